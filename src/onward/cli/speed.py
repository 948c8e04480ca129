"""How fast a model runs here, beside how fast this machine reads memory."""

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onward import LanguageModel

# Larger than any cache, small enough for any machine that holds a model.
_BUFFER_BYTES = 256 * 2**20


@dataclass
class Speed:
    """Seconds, one entry a run; a decode run has one for each token.

    first: what the first request took, in which programs are made; it is not among the others.
    bandwidth: bytes a second that the threads read from memory, measured between the runs.
    """

    first: float
    prefill: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)


def measure(lm: "LanguageModel", prompt_tokens: int, new_tokens: int, rounds: int) -> Speed:
    """Random prompts of `prompt_tokens`, each continued greedily by `new_tokens`, 2 or more.

    Raises:
        ContextOverflowError: more tokens than the model's context.
    """
    reader = _Reader()

    def run(seed: int) -> tuple[float, list[float]]:
        draw = random.Random(seed)
        prompt = [draw.randrange(lm.model.vocab_size) for _ in range(prompt_tokens)]
        completion = lm.generate(prompt, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        assert not isinstance(completion, list)
        timing = completion.timing
        return timing.prefill_ms / 1e3, [ms / 1e3 for ms in timing.per_token_ms]

    began = time.perf_counter()
    run(0)
    speed = Speed(first=time.perf_counter() - began)
    for seed in range(1, rounds + 1):
        speed.bandwidth.append(reader.bytes_per_second())
        prefill, tokens = run(seed)
        speed.prefill.append(prefill)
        speed.token += tokens
    return speed


class _Reader:
    """Reads a buffer of written pages with the threads that the kernels run on."""

    def __init__(self) -> None:
        import torch

        self._buffer = torch.full((_BUFFER_BYTES,), 7, dtype=torch.uint8)

    def bytes_per_second(self) -> float:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self._read()
            seconds.append(time.perf_counter() - began)
        return _BUFFER_BYTES / statistics.median(seconds)

    def _read(self) -> None:
        import torch

        from onward.ops.operators import usable_library

        library = usable_library()
        if library is None:
            self._buffer.view(torch.int64).sum()
        else:
            library.onward_probe_read(self._buffer.data_ptr(), _BUFFER_BYTES, 2**20)


def bytes_per_token(lm: "LanguageModel", position: int) -> tuple[int, int]:
    """(bytes of weights, bytes of cache) that the token at `position` reads."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    cache = pytree.tree_leaves(lm.new_cache(1, position + 1))
    held = sum(leaf.nbytes for leaf in cache if isinstance(leaf, Tensor))
    rows = lm.explain(1, 1, position).rows
    return sum(row.nbytes for row in rows) or lm.model.nbytes, held
