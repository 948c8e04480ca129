"""Hashes of the encoded programs of a fixed workload, for the demo model and a tiny model of every family."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from tests.golden.bits import DTYPES, models

import onward
from onward.program import compiled, encode
from onward.program.graph import TorchCall


class _NumbersByName:
    """Stands in for the native library: a kernel's number comes from its name, not from the order of registration."""

    @property
    def instructions(self) -> Self:
        return self

    def __getitem__(self, kernel: str) -> int:
        return int.from_bytes(hashlib.blake2b(kernel.encode(), digest_size=7).digest(), "little")


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The hash of each program that is encoded inside the block, in order."""
    hashes: list[str] = []

    def encode_and_hash(calls: Sequence[Any], storages: Sequence[Any], library: Any) -> encode.ProgramImage:
        image = encode.encode(calls, storages, _NumbersByName())
        digest = hashlib.blake2b(digest_size=8)
        for words in (image.words, image.places, image.bases, image.offsets, image.slot_bytes):
            digest.update(np.asarray(words, dtype="<i8").tobytes())
        digest.update(repr([call.node.name for call in image.calls if isinstance(call, TorchCall)]).encode())
        hashes.append(digest.hexdigest())
        return encode.encode(calls, storages, library)

    original = compiled.encode
    compiled.encode = encode_and_hash
    try:
        yield hashes
    finally:
        compiled.encode = original


def program_hashes(lm: onward.LanguageModel) -> list[str]:
    """The programs of one row and of four rows: prompts of 16 ids and single tokens, with and without logprobs."""
    with recorded() as hashes:
        for rows in (1, 4):
            for options in ({}, {"logprobs": 0, "prompt_logprobs": 0}):
                lm.generate([list(range(1, 17))] * rows, temperature=0.0, max_new_tokens=3, ignore_eos=True, **options)
    return hashes


def all_programs() -> dict[str, list[str]]:
    """The programs of every model, by "name dtype"."""
    torch.set_num_threads(2)  # programs may split their work by thread
    return {f"{name} {label}": program_hashes(lm) for label, dtype in DTYPES.items() for name, lm in models(dtype)}
