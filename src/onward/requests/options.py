"""What a call asks for beside the sampling parameters of its prompts."""

import dataclasses
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from onward.decoding import StopWhen
from onward.errors import RequestError
from onward.sampling import SamplingParams
from onward.sampling.params import check_whole
from onward.speculation import Speculator

# What draws a token; beams take the likeliest texts and draw none. To each the value that changes nothing.
_OF_DRAWING: dict[str, Any] = {
    "temperature": 0.0,
    "seed": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How many texts, what is told of them, and what ends the call; for all prompts of a call.

    n: texts a prompt. The prompt is processed once. Sample 0 is what n=1 gives; sample j is drawn with a seed
        derived from the request's (`onward.sampling.sample_seed`), which is its `Completion.seed`. With beams: the n
        best, best first.
    logprobs: report the logprob of each token, and of this many of the likeliest ids at its place; 0: of the token
        alone. Under the model's own distribution, before temperature, penalties and filters.
    prompt_logprobs: the same for the prompt's ids, each after those before it.
    beams: width of the beam search; 1 is none.
    length_penalty: beams are ranked by the sum of their logprobs / length^length_penalty; from -50 to 50.
    early_stopping: when a prompt's search ends. True: with `beams` finished texts. False: when the best running beam,
        at its present length, is worse than the worst of so many finished ones. "never": when no running beam can
        become better, by a bound that allows for every length up to max_new_tokens.
    time_limit: seconds from the call on, after which every text ends with its next token.
    stop_when: (ids so far, text so far) -> whether the text ends here; asked at each token.
    cancel: once set, by any thread, every text ends with its next token.
    draft: who guesses the next tokens, for several to be processed at once (docs/speculation.md); the tokens are the
        same without.

    Raises:
        RequestError: a value outside its range, or options that contradict each other.
    """

    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    time_limit: float | None = None
    stop_when: StopWhen | None = None
    cancel: threading.Event | None = None
    draft: Speculator | None = None

    def __post_init__(self) -> None:
        check_whole("n", self.n, low=1)
        check_whole("beams", self.beams, low=1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low=0)
        # Beyond, length^length_penalty leaves the range of a float for texts of a million tokens.
        if not (_is_finite(self.length_penalty) and abs(self.length_penalty) <= 50):
            raise RequestError(f"length_penalty must be a number from -50 to 50; got {self.length_penalty!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(f'early_stopping must be True, False or "never"; got {self.early_stopping!r}')
        if self.time_limit is not None and not (_is_finite(self.time_limit) and self.time_limit > 0):
            raise RequestError(f"time_limit must be a number of seconds above 0; got {self.time_limit!r}")
        if self.stop_when is not None and not callable(self.stop_when):
            raise RequestError(f"stop_when must be a function of (ids, text); got {self.stop_when!r}")
        if self.cancel is not None and not isinstance(self.cancel, threading.Event):
            raise RequestError(f"cancel must be a threading.Event; got {self.cancel!r}")
        if self.draft is not None and not isinstance(self.draft, Speculator):
            raise RequestError(f"draft must be an onward.Speculator; got {self.draft!r}")
        self._check_beams()

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """These options, and what is left for `SamplingParams`.

        Raises:
            RequestError: an option that neither has.
        """
        ours = {field.name for field in dataclasses.fields(cls)}
        known = [field.name for field in dataclasses.fields(SamplingParams)] + sorted(ours)
        if unknown := sorted(set(options) - set(known)):
            raise RequestError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(known)}")
        given = cls(**{name: value for name, value in options.items() if name in ours})
        return given, {name: value for name, value in options.items() if name not in ours}

    @property
    def rows(self) -> int:
        """Rows of the batch that a prompt takes."""
        return max(self.n, self.beams)

    def defaults(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults of the prompts' sampling parameters: those of a checkpoint that samples don't hold for beams."""
        return defaults if self.beams == 1 else defaults.replace(**_OF_DRAWING, xtc_threshold=0.1)

    def check_agreement(self, params: SamplingParams) -> None:
        """Raise where a prompt's sampling parameters contradict these options."""
        if self.beams > 1:
            drawing = [name for name, neutral in _OF_DRAWING.items() if getattr(params, name) != neutral]
            if drawing:
                raise RequestError(
                    f"beams={self.beams} takes the likeliest texts and draws none: leave out {', '.join(drawing)}"
                )
        elif self.n > 1 and params.temperature == 0:
            raise RequestError(
                f"n={self.n} with temperature 0 is the same text {self.n} times: give a temperature above 0, or beams"
            )

    def _check_beams(self) -> None:
        if self.beams > 1 and self.draft is not None:
            raise RequestError("a beam search cannot use a draft: leave out beams or draft")
        if self.beams > 1 and self.n > self.beams:
            raise RequestError(f"n is {self.n}, but {self.beams} beams find {self.beams} texts: ask for fewer or widen")
        of_beams = ("length_penalty", "early_stopping")
        changed = [name for name in of_beams if getattr(self, name) != getattr(type(self), name)]
        if self.beams == 1 and changed:
            raise RequestError(f"{', '.join(changed)} would change nothing without a beam search: give beams=2 or more")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
