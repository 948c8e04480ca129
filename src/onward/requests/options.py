"""The options of a request: all that it may ask for beside its prompt."""

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias

from onward.checkpoint import ChatTemplate, Tokenizer
from onward.checks import as_tuple, check_whole, is_finite, plain
from onward.decoding import StopWhen
from onward.errors import RequestError
from onward.models import Model
from onward.option_names import check_option_names
from onward.sampling import SamplingOptionsDict, SamplingParams
from onward.sampling.params import option_names as names_of
from onward.sampling.transforms import Filter, transforms_of
from onward.speculation import Drafter, Speculator


class DraftLanguageModel(Protocol):
    """The attributes of a `LanguageModel` that drafting needs."""

    model: Model
    tokenizer: Tokenizer | None


# What `draft=` takes: "lookup", "suffix", a smaller model of the same vocabulary, a drafter; None drafts nothing.
Draft: TypeAlias = str | DraftLanguageModel | Model | Drafter | Speculator


class GenerateOptionsDict(SamplingOptionsDict, total=False):
    """The fields of `GenerateOptions` as keyword arguments, for editors and type checkers."""

    max_new_tokens: int | None
    stop: str | Sequence[str]
    time_limit: float | None
    stop_when: StopWhen | None
    cancel: threading.Event | None
    n: int
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    logprobs: int | None
    prompt_logprobs: int | None
    draft: Draft | None


class ChatOptionsDict(GenerateOptionsDict, total=False):
    """The options of a chat as keyword arguments. Other variables that the chat template reads may be given too."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool
    reasoning_effort: str
    template: Mapping[str, Any] | None


# Variables that many chat templates read.
_TEMPLATE_VARIABLES = (
    frozenset(ChatOptionsDict.__annotations__) - frozenset(GenerateOptionsDict.__annotations__) - {"template"}
)

# Options for drawing a token, each with the value that changes nothing. Beams take the likeliest texts and draw none.
_OF_DRAWING: dict[str, Any] = {
    field.name: field.default
    for filter in transforms_of(SamplingParams, Filter)
    for field in dataclasses.fields(filter)
} | {"seed": None}
# Options that only beams use.
OF_BEAMS = ("length_penalty", "early_stopping")


@dataclass(frozen=True, kw_only=True, repr=False)
class GenerateOptions(SamplingParams):
    """All that a request may ask for: how tokens are chosen, where texts end, how many there are, what is reported.

    The options of `SamplingParams`, and:

    max_new_tokens: the most tokens to emit; 0 emits none. None: as many as the context holds after the prompt.
    stop: strings that end the text; the text ends before the first of them.
    time_limit: seconds from the call on, after which every text ends with its next token.
    stop_when: (ids so far, text so far) -> whether the text ends here; called at each token.
    cancel: once any thread has set it, every text ends with its next token.
    n: how many texts a prompt gets. The prompt is processed once. Sample 0 is the text that n=1 gives. Sample j is
        drawn with a seed derived from the request's (`onward.sampling.sample_seed`), which is its `Completion.seed`.
        With beams: the n best texts, best first.
    logprobs: report the logprob of each token, and of this many of the likeliest ids at its place; 0: of the token
        alone. Logprobs are under the model's own distribution, before temperature, penalties and filters.
    prompt_logprobs: the same for the prompt's ids, each given the ids before it.
    beams: width of the beam search; 1 is none.
    length_penalty: beams are ranked by the sum of their logprobs / length^length_penalty; from -50 to 50.
    early_stopping: when a prompt's search ends. True: when `beams` texts are finished. False: when `beams` texts are
        finished and the best running beam, at its present length, is worse than the worst of them. "never": when no
        running beam can become better, by a bound that allows for every length up to max_new_tokens.
    draft: guesses the next tokens, so that several are processed at once (docs/speculation.md). The tokens are the
        same without it.

    Raises:
        RequestError: a value outside its range, or options that contradict each other.
    """

    max_new_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    time_limit: float | None = None
    stop_when: StopWhen | None = None
    cancel: threading.Event | None = None
    n: int = 1
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft: Speculator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_end()
        check_whole("n", self.n, low=1)
        check_whole("beams", self.beams, low=1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low=0)
        # With a larger penalty length^length_penalty would leave the range of a float for texts of a million tokens.
        if not (is_finite(self.length_penalty) and abs(self.length_penalty) <= 50):
            raise RequestError(f"length_penalty must be a number from -50 to 50; got {self.length_penalty!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(f'early_stopping must be True, False or "never"; got {self.early_stopping!r}')
        if self.draft is not None and not isinstance(self.draft, Speculator):
            raise RequestError(f"draft must be an onward.Speculator; got {self.draft!r}")
        self._check_search()

    def _check_end(self) -> None:
        self._set("stop", as_tuple("stop", self.stop, str))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop must be non-empty strings; got {list(self.stop)!r}")
        if self.max_new_tokens is not None:
            self.check_length(self.max_new_tokens)
        if self.time_limit is not None and not (is_finite(self.time_limit) and self.time_limit > 0):
            raise RequestError(f"time_limit must be a number of seconds above 0; got {self.time_limit!r}")
        if self.stop_when is not None and not callable(self.stop_when):
            raise RequestError(f"stop_when must be a function of (ids, text); got {self.stop_when!r}")
        if self.cancel is not None and not isinstance(self.cancel, threading.Event):
            raise RequestError(f"cancel must be a threading.Event; got {self.cancel!r}")

    @property
    def rows(self) -> int:
        """How many rows of the batch a prompt takes."""
        return max(self.n, self.beams)

    def replace(self, **options: Any) -> Self:
        """A copy with `options` changed and checked.

        A change drops options that mean nothing with it, for they may be a checkpoint's defaults for another kind of
        decoding. A change to beams drops the options for drawing (temperature, top_k, …). A change from beams drops
        theirs (length_penalty, early_stopping) and n. Greedy decoding drops n. A smaller max_new_tokens lowers
        min_new_tokens.

        Raises:
            RequestError: an unknown option, a value outside its range, or options that contradict each other.
        """
        if (beams := options.get("beams", self.beams)) != 1 and self.beams == 1:
            options = _OF_DRAWING | options
        elif beams == 1 and self.beams != 1:
            options = {name: getattr(type(self), name) for name in OF_BEAMS} | {"n": 1} | options
        if self.n > 1 and beams == 1 and plain(options.get("temperature", self.temperature)) == 0:
            options = {"n": 1} | options
        most = plain(options.get("max_new_tokens"))
        if isinstance(most, int) and 0 <= most < self.min_new_tokens:
            options = {"min_new_tokens": most} | options
        return super().replace(**options)

    def _check_search(self) -> None:
        if self.beams > 1 and self.draft is not None:
            raise RequestError("a beam search cannot use a draft: leave out beams or draft")
        if self.beams > 1 and self.n > self.beams:
            raise RequestError(f"n is {self.n}, but {self.beams} beams find {self.beams} texts: ask for fewer or widen")
        if self.beams > 1:
            drawing = [name for name, neutral in _OF_DRAWING.items() if getattr(self, name) != neutral]
            if drawing:
                raise RequestError(
                    f"beams={self.beams} takes the likeliest texts and draws none: leave out {', '.join(drawing)}, "
                    "or give beams=1"
                )
        elif self.n > 1 and self.temperature == 0:
            raise RequestError(
                f"n={self.n} with temperature 0 is the same text {self.n} times: give a temperature above 0, or beams"
            )
        changed = [name for name in OF_BEAMS if getattr(self, name) != getattr(type(self), name)]
        if self.beams == 1 and changed:
            raise RequestError(f"{', '.join(changed)} would change nothing without a beam search: give beams=2 or more")


@functools.cache
def option_names() -> tuple[str, ...]:
    """The name of every option of a request, `max_new_tokens` first."""
    names = names_of(GenerateOptions)
    return ("max_new_tokens", *(name for name in names if name != "max_new_tokens"))


def split_chat_options(
    template: ChatTemplate | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], GenerateOptionsDict]:
    """The variables of the chat template, and the options that are left for `generate`.

    Raises:
        RequestError: what is neither an option nor a variable that the template reads.
    """
    names = option_names()
    variables: frozenset[str] = frozenset() if template is None else template.variables
    unread = sorted(set(options) & _TEMPLATE_VARIABLES - variables)
    if unread and template is not None:
        reads = ", ".join(sorted(variables)) or "no variables"
        raise RequestError(f"this model's chat template does not read {', '.join(unread)}; it reads {reads}")
    check_option_names(set(options) - {"template", "cache"}, [*names, *sorted(variables - set(names))])
    of_template = {name: value for name, value in options.items() if name in variables and name not in names}
    others: Any = {name: value for name, value in options.items() if name not in {"template", *of_template}}
    return {**of_template, **(options.get("template") or {})}, others
