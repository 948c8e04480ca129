"""Hashes of ids and logprobs: the frozen demo model and a tiny model of every family, greedy and sampled."""

import hashlib
import struct
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from tests.golden import DEMO
from torch import Tensor

import onward
from onward.models import FAMILIES, Model, WeightScope, build_model, read_config
from onward.testing import tiny_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Longer than a block of the cache and than the tiny families' windows; no multiple of a prefill chunk.
PROMPT, NEW_TOKENS = 70, 12
SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7, "n": 2}
STORY = "Once upon a time there was a fox who"
# Spreads the ids of a prompt over a vocabulary (Knuth's multiplicative hashing).
_SPREAD = 2_654_435_761


def family_names() -> list[str]:
    """The short names of all families, as `tiny_model` takes them."""
    return sorted(name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM"))


def models(dtype: torch.dtype) -> Iterator[tuple[str, onward.LanguageModel]]:
    """(name, model) of the frozen demo model and of every family, one after another."""
    for name in ("demo", *family_names()):
        yield name, language_model(name, dtype)


def language_model(name: str, dtype: torch.dtype) -> onward.LanguageModel:
    """The frozen demo model, or a tiny model of a family."""
    return onward.load(DEMO, dtype=dtype) if name == "demo" else onward.LanguageModel(family_model(name, dtype))


def family_model(family: str, dtype: torch.dtype) -> Model:
    """A tiny model of the family, whose weights are the same bits on every processor."""
    config = read_config(tiny_config(family))
    return build_model(config, config.read(WeightScope(_UniformTensors(dtype))))


class _UniformTensors:
    """Makes every tensor that a family requests. torch.randn gives other bits on another processor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._generator = np.random.Generator(np.random.PCG64(0))
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.from_numpy(self._generator.random(shape)).float().sub(0.5).mul(12**0.5)  # variance 1
        # Activations and logits keep a size of about 1 through every layer.
        tensor = 1 + 0.1 * noise if name.endswith(("norm.weight", "norm_f.weight")) else noise * shape[-1] ** -0.5
        return tensor.to(dtype or self._dtype)


def bits(lm: onward.LanguageModel) -> dict[str, str]:
    """The hash of a greedy and of a sampled text: ids, and the logprobs of prompt and continuation.

    With a tokenizer, also the hash of a story from a prompt in words.
    """
    ids = [number * _SPREAD % lm.model.vocab_size for number in range(1, PROMPT + 1)]
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 0}
    greedy = lm.generate(ids, temperature=0.0, **common)
    sampled = lm.generate(ids, **SAMPLED, **common)
    hashes = {"greedy": _hash([greedy]), "sampled": _hash(sampled.choices)}
    if lm.tokenizer is not None:
        hashes["story"] = _hash([lm.generate(STORY, temperature=0.7, seed=3, max_new_tokens=100, logprobs=0)])
    return hashes


def all_bits(labels: Iterable[str] = DTYPES) -> dict[str, dict[str, str]]:
    """The hashes of every model, by "name dtype"."""
    return {f"{name} {label}": bits(lm) for label in labels for name, lm in models(DTYPES[label])}


def _hash(completions: list[onward.Completion]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for completion in completions:
        digest.update(struct.pack(f"<{len(completion.token_ids)}q", *completion.token_ids))
        for entry in (*(completion.prompt_logprobs or ()), *(completion.logprobs or ())):
            if entry is not None:
                digest.update(struct.pack("<d", entry.chosen))
                digest.update(struct.pack(f"<{len(entry.top)}q", *(token_id for token_id, _ in entry.top)))
    return digest.hexdigest()
