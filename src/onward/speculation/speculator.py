"""A drafter with its verifier, and what they have learnt of costs and acceptance."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from onward.checks import check_whole
from onward.decoding import Picker, Row
from onward.decoding.step import Run
from onward.errors import RequestError
from onward.models import Model
from onward.reprs import described
from onward.sampling import Sampler
from onward.speculation.drafter import Drafter, DraftRequest
from onward.speculation.drafters import ModelHolder, as_drafter
from onward.speculation.pace import LENGTHS, Acceptance, Pace
from onward.speculation.step import SpeculativeStep
from onward.speculation.verify import Verifier, coupled, rejection

_VERIFIERS: dict[str, Verifier] = {"coupled": coupled, "rejection": rejection}
# The length of drafts for the accept/resample rule. It is fixed, for the ids depend on it.
_FIXED_LENGTH = 4


class Speculator:
    """A drafter with a verifier: makes a `SpeculativeStep` for each request.

    It keeps what it learns of costs and acceptance for further requests, so use one for each target.

    drafter: a `Drafter`, "lookup", "suffix", a `Model` or a `LanguageModel`. The ids of the last two must mean the same
        as the target's. This is not checked here; `draft=` compares the tokenizers of LanguageModels.
    length: how many ids every draft has. By default the length adapts to what is accepted and to the cost of a round,
        up to 15 ids, and drafting stops where it does not pay (`onward.speculation.pace`).
    verifier: "coupled" emits the ids of plain decoding, whatever is drafted. "rejection" is the accept/resample rule.
        Its ids have the distribution of plain decoding, but they are other ids and depend on the drafts. So its length
        is fixed, 4 by default.
    clock: returns seconds.

    Raises:
        RequestError: what is no drafter, an unknown verifier, or a length below 1.
    """

    def __init__(
        self,
        drafter: "Drafter | Model | ModelHolder | str",
        *,
        length: int | None = None,
        verifier: Literal["coupled", "rejection"] = "coupled",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if verifier not in _VERIFIERS:
            raise RequestError(f"verifier must be one of {', '.join(_VERIFIERS)}; got {verifier!r}")
        if length is not None:
            check_whole("length", length, low=1)
        elif verifier == "rejection":
            length = _FIXED_LENGTH
        self.drafter = as_drafter(drafter)
        self.length = length
        self.verifier = verifier
        self._clock = clock
        self._acceptance = Acceptance()
        self._pace = None if length is not None else Pace()

    def __repr__(self) -> str:
        length = "adaptive" if self.length is None else str(self.length)
        return described(self, type(self.drafter).__name__, f"length {length}", self.verifier)

    def step(
        self,
        run: Run,
        picker: Picker,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Row],
        *,
        max_len: int,
        vocab_size: int,
        device: torch.device,
        chunk: int = 512,
    ) -> SpeculativeStep:
        """The step of a request.

        Args:
            run, picker, chunk: as in `DecodeStep`.
            prompts, rows: one of each for every row of the loop.
            max_len: the most positions that a row takes. It is the cache's length where the cache does not give it.
            vocab_size: V of the logits. device: where tokens go.

        Raises:
            RequestError: the verifier is "rejection" and the picker has no `Sampler`, so there is no distribution.
        """
        select = picker.of(tuple(range(len(rows))))
        if self.verifier == "rejection" and not isinstance(select, Sampler):
            raise RequestError("the verifier 'rejection' needs a Sampler, for its distribution: use 'coupled'")
        request = DraftRequest(
            rows=len(rows),
            max_len=max_len,
            longest=LENGTHS[-1] if self.length is None else self.length,
            vocab_size=vocab_size,
            select=select,
            histories=picker.histories,
            probabilities=self.verifier == "rejection",
            device=device,
        )
        return SpeculativeStep(
            run,
            picker,
            drafter=self.drafter,
            verifier=_VERIFIERS[self.verifier],
            request=request,
            prompts=prompts,
            rows=rows,
            pace=self._pace,
            acceptance=self._acceptance,
            chunk=chunk,
            clock=self._clock,
        )
