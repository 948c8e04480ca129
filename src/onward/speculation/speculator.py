"""How texts are drafted and verified, and what has been learnt about it."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from onward.decoding import Picker, Row
from onward.decoding.step import Run
from onward.errors import RequestError
from onward.models import Model
from onward.reprs import described
from onward.sampling import Sampler
from onward.sampling.params import check_whole
from onward.speculation.drafter import Drafter, DraftRequest
from onward.speculation.drafters import ModelHolder, as_drafter
from onward.speculation.pace import LENGTHS, Acceptance, Pace
from onward.speculation.step import SpeculativeStep
from onward.speculation.verify import Verifier, coupled, rejection

_VERIFIERS: dict[str, Verifier] = {"coupled": coupled, "rejection": rejection}
# Of drafts for the accept/resample rule, whose ids depend on it.
_FIXED_LENGTH = 4


class Speculator:
    """A drafter with a verifier: makes a `SpeculativeStep` for each request.

    It keeps what it learns of costs and acceptance for further requests, so each target wants one of its own.

    drafter: who guesses: a `Drafter`, "lookup", "suffix", a `Model` or a `LanguageModel`. The last two must mean the
        same by an id as the target does: `draft=` compares the tokenizers of LanguageModels, this does not.
    length: ids of every draft; by default it adapts to what is accepted and to what rounds cost, up to 15, and
        drafting stops where it does not pay (`onward.speculation.pace`).
    verifier: "coupled" emits the ids of plain decoding, whatever is drafted. "rejection" is the accept/resample rule:
        the distribution of plain decoding, but other ids, which depend on the drafts; so its length is fixed, 4 by
        default.
    clock: seconds.

    Raises:
        RequestError: no drafter, or another verifier or length.
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
            raise RequestError(f"verifier is one of {', '.join(_VERIFIERS)}; got {verifier!r}")
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
            run, picker, chunk: as of `DecodeStep`.
            prompts, rows: by owner.
            max_len: the most positions that a row takes, and that its cache holds where that does not say so itself.
            vocab_size: V of the logits. device: where tokens go.

        Raises:
            RequestError: the accept/resample rule for a picker without a `Sampler`, which has no distribution.
        """
        select = picker.of(tuple(range(len(rows))))
        if self.verifier == "rejection" and not isinstance(select, Sampler):
            raise RequestError("the verifier 'rejection' needs a Sampler, which has a distribution: use 'coupled'")
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
