"""What the loop carries from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from onward.models import Cache


@dataclass(frozen=True)
class DecodeState:
    """Pending tokens and the cache that they will be written into.

    tokens   int32 [B, T]   ids not yet processed, padded on the right; T is a prompt's length, then 1
    lengths  int32 [B]      how many of a row's tokens are real, 1 or more
    offsets  int32 [B]      absolute position of tokens[:, 0]: what each row's cache already holds
    live     bool [B]       rows that go on; the others stand still and their output is dropped
    cache    pytree         as the model made it
    """

    tokens: Tensor
    lengths: Tensor
    offsets: Tensor
    live: Tensor
    cache: Cache

    @classmethod
    def start(cls, prompts: Sequence[Sequence[int]], cache: Cache, device: torch.device, offset: int = 0) -> Self:
        """Pending prompts (each of one id at least) over a cache that holds `offset` positions of every row."""
        assert all(prompts), "an empty prompt has nothing to predict from"
        longest = max(map(len, prompts))
        # Padding repeats a row's last id: any valid id will do, for what follows a row's length is never read.
        padded = [[*prompt, *([prompt[-1]] * (longest - len(prompt)))] for prompt in prompts]
        return cls(
            tokens=torch.tensor(padded, dtype=torch.int32, device=device),
            lengths=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device),
            offsets=torch.full((len(prompts),), offset, dtype=torch.int32, device=device),
            live=torch.ones(len(prompts), dtype=torch.bool, device=device),
            cache=cache,
        )
