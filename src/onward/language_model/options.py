"""The options of a request, validated."""

import dataclasses
import datetime
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, Unpack

from torch import Tensor

from onward.chat import PROMPT_ENDINGS, AnswerFormat, ChatTemplate, ToolChoice, ToolLike
from onward.constraints import Choice, JsonSchema, Lark, Regex
from onward.decoding import StopWhen
from onward.decoding.speculation import Drafter, ModelHolder, Speculator
from onward.errors import OptionError, RequestError, blaming
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.reasoning import ReasoningBudget
from onward.language_model.steering import combined, read_prompt_embeds, read_steering
from onward.models import Model
from onward.models.adapters import Steer, Steering
from onward.sampling import Constraint, SamplingParams
from onward.sampling.params import option_names as names_of
from onward.sampling.transforms import Filter, transforms_of
from onward.tokenizer import Tokenizer
from onward.util.checks import plain
from onward.util.option_names import check_option_names, checks_option_names
from onward.util.options import LENGTH, OUTPUT, STRUCTURE, TEXTS, option

# What `draft=` takes: "lookup", "suffix", a smaller model of the same vocabulary, a drafter; None drafts nothing.
Draft: TypeAlias = str | ModelHolder | Model | Drafter | Speculator

# What `constraint=` takes: a constraint in its initial state, or a function (tokenizer, ids that end a text) that makes
# one, like every `onward.constraints.Grammar`.
ConstraintMaker: TypeAlias = Constraint | Callable[[Tokenizer | None, AbstractSet[int]], Constraint]


class ChatOptionsDict(GenerateOptionsDict, total=False):
    """The options of a chat as keyword arguments. Other variables of the chat template are accepted too.

    tools: callable tools: {"type": "function", "function": {"name", "description", "parameters", "strict"}}, or Python
        functions.
    tool_choice: "auto" (the default), "none", "required", or the tool to call: its name, or
        {"type": "function", "function": {"name": …}}.
    parallel_tool_calls: whether an answer may have several calls; True by default.
    add_generation_prompt: whether the prompt ends with the beginning of the assistant's turn; by default it does,
        unless it continues a message.
    continue_final_message: whether the answer is the rest of the final message, whose content is its beginning.
    documents, enable_thinking: variables of templates that read them.
    reasoning_effort: likewise; for a template of a model that reasons, but does not read it, a reasoning budget:
        "none", "minimal", "low", "medium", "high", "xhigh" or "max" (docs/chat.md).
    template: further variables, including those with the names of options.
    now: the time, for templates that write the date; by default the current time in UTC. With it the prompt does not
        depend on the clock.
    """

    tools: Sequence[ToolLike] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool
    reasoning_effort: str
    template: Mapping[str, Any] | None
    now: datetime.datetime | None


# Chat options that are not variables of templates.
_CHAT_ONLY = frozenset({"template", "now", "tool_choice", "parallel_tool_calls", *PROMPT_ENDINGS})
# Variables that many chat templates read.
_TEMPLATE_VARIABLES = (
    frozenset(ChatOptionsDict.__annotations__) - frozenset(GenerateOptionsDict.__annotations__) - _CHAT_ONLY
)

# Options for sampling, each with its neutral value. Beam search does not sample.
_SAMPLING_OPTIONS: dict[str, Any] = {
    field.name: field.default
    for filter in transforms_of(SamplingParams, Filter)
    for field in dataclasses.fields(filter)
} | {"seed": None, "sampling_logprobs": False}
# Options of beam search only.
BEAM_OPTIONS = ("length_penalty", "early_stopping")
# Options that constrain the text; they are mutually exclusive.
CONSTRAINTS = ("json_schema", "regex", "grammar", "choice", "constraint")


@checks_option_names
@dataclass(frozen=True, kw_only=True, repr=False)
class GenerateOptions(SamplingParams):
    """The options of a request: sampling, the end of texts, their number, and what is reported.

    The options of `SamplingParams`, and:

    max_new_tokens: the maximum number of tokens to emit; 0 emits none. None: up to the end of the context.
    stop: strings that end the text; the text ends before the first of them. They may contain special tokens, such as
        "<|im_end|>", which are not part of the text.
    reasoning_budget: in a chat, the maximum number of tokens of reasoning; 0: none. After that many, the reasoning is
        closed, and the answer continues (docs/chat.md). None: any number.
    reasoning_budget_message: the text that a reasoning budget adds at the end of the reasoning that it closes; None:
        `DEFAULT_BUDGET_MESSAGE`. A budget of 0 adds none.
    time_limit: seconds from the call, after which each text ends with its next token.
    stop_when: (ids so far, text so far) -> whether the text ends here; called at each token.
    cancel: once any thread has set it, each text ends with its next token.
    n: the number of texts for a prompt, which is processed once. Sample 0 is the text that n=1 gives. The seed of
        sample j is derived from the request's (`onward.sampling.sample_seed`) and reported as `Completion.seed`. With
        temperature 0 the texts are equal. With beams: the n best texts, best first.
    logprobs: report the logprob of each token, and of this many of the most likely ids at its position; 0: of the token
        only. Logprobs are those of the model itself, before temperature, penalties and filters.
    prompt_logprobs: the same for the prompt's ids, each given the ids before it.
    sampling_logprobs: with logprobs, also report the logprob of each token under the distribution that it was drawn
        from, after penalties, constraints, temperature and filters, and how many ids could be drawn.
    beams: the width of the beam search; 1 is none.
    length_penalty: beams are ranked by the sum of their logprobs / length^length_penalty; from -50 to 50.
    early_stopping: when a prompt's search ends. True: when `beams` texts are finished. False: when `beams` texts are
        finished and the best running beam, at its present length, is worse than the worst of them. "never": when no
        running beam can become better, by a bound that allows for every length up to max_new_tokens.
    taps: report the values at these taps (`onward.tap`; "layers.12", "embedding", "norm"), each of some positions:
        "last": of the prompt's last id. "new": of the positions whose logits chose the new ids. "all": of all ids but
        the last new one, which is never processed (docs/hidden-states.md).
    draft: drafts the next tokens, so that several are processed at once (docs/speculation.md). The tokens are the same
        without it.
    adapter: the name of a loaded adapter to apply (docs/adapters.md).
    steer: vectors that change the values at taps ("layers.12"): each is added at every position, or is an
        `onward.Steer` with a scale, with replace=True, or for some positions. Or the path of a control vector, a GGUF
        file (docs/hidden-states.md).
    prompt_embeds: vectors [N, D] in place of the embeddings of the prompt's ids, by the position of the first
        (docs/hidden-states.md).
    cache_salt: cached prefixes, also those on disk, are shared only by requests with an equal salt, such as the secret
        of a tenant, so that nobody can measure which prompts others have sent (docs/prefix-cache.md).
    json_schema: the text is JSON that meets this schema (a dict, or a pydantic class); `Completion.parsed` is its
        value.
    regex: the whole text matches this regular expression, in Rust's syntax.
    grammar: the text is derived from this grammar, in Lark's syntax or GBNF.
    choice: the text is one of these.
    constraint: an `onward.Constraint` in its initial state, which is copied for each text; or a function of the
        tokenizer and the ids that end a text, which makes one (docs/structured.md).

    Raises:
        RequestError: a value outside its range, or options that contradict each other.
    """

    max_new_tokens: int | None = option(
        128, low=0, help="Maximum number of tokens to generate.", group=LENGTH, flag="-n"
    )
    stop: tuple[str, ...] = option((), low=1, help="Stop before TEXT.", group=LENGTH)
    reasoning_budget: int | None = option(
        None, low=0, help="Maximum number of tokens of reasoning in a chat; 0: none.", group=LENGTH
    )
    reasoning_budget_message: str | None = option(
        None,
        help="End reasoning that --reasoning-budget cuts with TEXT.",
        group=LENGTH,
        show_default="that it must answer",
    )
    time_limit: float | None = option(
        None, above=0, unit="seconds", help="Stop after SECONDS.", group=LENGTH, metavar="SECONDS"
    )
    stop_when: StopWhen | None = option(
        None, help="Stop where this function of (ids, text) returns True.", group=LENGTH, flag=""
    )
    cancel: threading.Event | None = option(None, help="Stop once this event is set.", group=LENGTH, flag="")
    n: int = option(1, low=1, help="Number of texts, separated by '---' lines.", group=TEXTS, flag="--samples")
    beams: int = option(1, low=1, help="Number of beams; prints the best text, or the best --samples.", group=TEXTS)
    # With a larger penalty length^length_penalty would leave the range of a float for texts of a million tokens.
    length_penalty: float = option(
        1.0, low=-50, high=50, help="Length penalty of beam search; above 0 favors long texts.", group=TEXTS
    )
    early_stopping: bool | Literal["never"] = option(
        False, help="When a beam search ends: True, False or 'never'.", group=TEXTS, flag=""
    )
    logprobs: int | None = option(
        None, low=0, help="With --json, include logprobs of each token and the N most likely.", group=OUTPUT
    )
    prompt_logprobs: int | None = option(None, low=0, help="The same for the prompt's tokens.", group=OUTPUT)
    sampling_logprobs: bool = option(
        False, help="With --logprobs, include those of the distribution after filters.", group=OUTPUT
    )
    taps: Mapping[str, Literal["last", "new", "all"]] | None = option(
        None, help='Report the values at taps of the forward: name -> "last", "new" or "all".', group=OUTPUT, flag=""
    )
    draft: Speculator | None = option(
        None, takes=Draft | None, help="Speculative decoding; the text is unchanged.", group=OUTPUT, flag=""
    )
    adapter: str | None = option(None, help="Name of a loaded adapter to apply.", group=OUTPUT, flag="")
    steer: Steering | None = option(
        None,
        takes=Mapping[str, Tensor | Steer] | str | os.PathLike[str] | Steering | None,
        help="Steer with the control vector in FILE, a GGUF file.",
        group=OUTPUT,
        flag="--control-vector",
        metavar="FILE",
    )
    prompt_embeds: Steering | None = option(
        None,
        takes=Mapping[int, Tensor] | Steering | None,
        help="Vectors in place of the prompt's embeddings: first position -> [N, D].",
        group=OUTPUT,
        flag="",
    )
    cache_salt: str | None = option(None, help="Share cached prefixes only with an equal salt.", group=OUTPUT, flag="")
    json_schema: JsonSchema | None = option(
        None,
        takes=Mapping[str, Any] | bool | type | JsonSchema | None,
        help="Generate JSON that conforms to the JSON Schema in FILE.",
        group=STRUCTURE,
        metavar="FILE",
    )
    regex: str | None = option(
        None,
        help="Generate text that matches PATTERN from start to end.",
        group=STRUCTURE,
        metavar="PATTERN",
    )
    grammar: str | None = option(
        None, help="Generate text that matches the Lark or GBNF grammar in FILE.", group=STRUCTURE, metavar="FILE"
    )
    choice: tuple[str, ...] | None = option(None, low=1, help="Generate TEXT or another --choice.", group=STRUCTURE)
    constraint: ConstraintMaker | None = option(
        None, help="A constraint in its initial state, or a function that makes one.", group=STRUCTURE, flag=""
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is not None:
            self.check_length(self.max_new_tokens)
        if self.stop_when is not None and not callable(self.stop_when):
            raise OptionError("stop_when", f"must be a function of (ids, text); got {self.stop_when!r}")
        if self.cancel is not None and not isinstance(self.cancel, threading.Event):
            raise OptionError("cancel", f"must be a threading.Event; got {self.cancel!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise OptionError("early_stopping", f'must be True, False or "never"; got {self.early_stopping!r}')
        if self.draft is not None and not isinstance(self.draft, Speculator):
            raise OptionError("draft", f"must be an onward.Speculator; got {self.draft!r}")
        if self.taps is not None:
            self._set("taps", _checked_taps(self.taps))
        if self.steer is not None and not isinstance(self.steer, Steering):
            self._set("steer", read_steering(self.steer))
        if self.prompt_embeds is not None and not isinstance(self.prompt_embeds, Steering):
            self._set("prompt_embeds", read_prompt_embeds(self.prompt_embeds))
        if self.reasoning_budget_message is not None and self.reasoning_budget is None:
            raise OptionError("reasoning_budget_message", "has no effect without a reasoning_budget: set that too")
        if self.sampling_logprobs and self.logprobs is None:
            raise OptionError("sampling_logprobs", "has no effect without logprobs: set logprobs to 0 or more")
        self._check_search()
        self._check_constraint()

    def _check_constraint(self) -> None:
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) > 1:
            message = f"{' and '.join(constraints)} are mutually exclusive: give one of them"
            raise RequestError(message, constraints[1])
        if self.json_schema is not None and not isinstance(self.json_schema, JsonSchema):
            self._set("json_schema", JsonSchema(self.json_schema))
        if self.choice is not None:
            self._set("choice", Choice(self.choice).texts)
        if self.constraint is not None and not (isinstance(self.constraint, Constraint) or callable(self.constraint)):
            raise OptionError(
                "constraint",
                "must be an onward.Constraint, with mask, accept, rollback, fork, is_done and forced, or a function of "
                f"(tokenizer, stop_ids) that makes one; got {self.constraint!r}",
            )
        _ = self.constrained_by  # validates the others

    @property
    def constrained_by(self) -> ConstraintMaker | None:
        """The text's constraint; None for any text."""
        if self.json_schema is not None:
            return self.json_schema
        if self.regex is not None:
            return Regex(self.regex)
        if self.grammar is not None:
            return Lark(self.grammar)
        if self.choice is not None:
            return Choice(self.choice)
        return self.constraint

    def new_constraint(self, tokenizer: Tokenizer | None, answer: AnswerFormat | None = None) -> Constraint | None:
        """The constraint in its initial state, in a chat's answer with the reasoning budget; None for any text. Raises
        `RequestError` for a grammar that cannot be compiled, or a message that cannot be in reasoning, and
        `TokenizerError` without a suitable tokenizer."""
        constraint = self._new_constraint(tokenizer)
        if self.reasoning_budget is None or answer is None:
            return constraint
        assert tokenizer is not None, "a chat has a tokenizer"
        return ReasoningBudget.of(self.reasoning_budget, self.reasoning_budget_message, answer, tokenizer, constraint)

    def _new_constraint(self, tokenizer: Tokenizer | None) -> Constraint | None:
        maker = self.constrained_by
        if maker is None or isinstance(maker, Constraint):
            return None if maker is None else maker.fork()
        with blaming("constraint"):
            constraint = maker(tokenizer, self.stop_ids)
        if not isinstance(constraint, Constraint):
            message = f"the constraint function must return an onward.Constraint; it returned {constraint!r}"
            raise RequestError(message, "constraint")
        return constraint

    @property
    def steering(self) -> Steering | None:
        """What changes the values at taps."""
        if self.steer is None or self.prompt_embeds is None:
            return self.steer or self.prompt_embeds
        return combined(self.steer, self.prompt_embeds)

    @property
    def rows(self) -> int:
        return max(self.n, self.beams)

    def replace(self, **options: Unpack[GenerateOptionsDict]) -> Self:
        """A validated copy with `options` changed.

        A change drops options without meaning under it, because they may be a checkpoint's defaults for another kind of
        decoding. A change to beams drops the sampling options (temperature, top_k, …). A change from beams drops theirs
        (length_penalty, early_stopping) and n. A change from sampling to greedy decoding drops n. A smaller
        max_new_tokens lowers min_new_tokens. A constraint drops that of another kind. No reasoning_budget drops its
        message. `draft` is a Speculator here, or None.

        Raises:
            RequestError: an unknown option, a value outside its range, or options that contradict each other.
        """
        changed: dict[str, Any] = {**options}
        if (beams := changed.get("beams", self.beams)) != 1 and self.beams == 1:
            changed = _SAMPLING_OPTIONS | changed
        elif beams == 1 and self.beams != 1:
            changed = {name: getattr(type(self), name) for name in BEAM_OPTIONS} | {"n": 1} | changed
        if self.temperature > 0 and beams == 1 and plain(changed.get("temperature")) == 0:
            changed = {"n": 1} | changed
        maximum = plain(changed.get("max_new_tokens"))
        if isinstance(maximum, int) and 0 <= maximum < self.min_new_tokens:
            changed = {"min_new_tokens": maximum} | changed
        if changed.get("logprobs", self.logprobs) is None:
            changed = {"sampling_logprobs": False} | changed
        if changed.get("reasoning_budget", self.reasoning_budget) is None:
            changed = {"reasoning_budget_message": None} | changed
        if any(changed.get(name) is not None for name in CONSTRAINTS):
            changed = dict.fromkeys(CONSTRAINTS) | changed
        return super().replace(**changed)

    def _check_search(self) -> None:
        if self.beams > 1:
            if self.draft is not None:
                raise RequestError("a beam search cannot use a draft: leave out beams or draft", "draft")
            if self.n > self.beams:
                raise OptionError(
                    "n",
                    f"is {self.n}, but {self.beams} beams find {self.beams} texts: ask for fewer, or for more beams",
                )
            if drawing := [name for name, neutral in _SAMPLING_OPTIONS.items() if getattr(self, name) != neutral]:
                problem = f"searches and does not sample: leave out {', '.join(drawing)}, or give beams=1"
                raise RequestError(f"beams={self.beams} {problem}", drawing[0])
        changed = [name for name in BEAM_OPTIONS if getattr(self, name) != getattr(type(self), name)]
        if self.beams == 1 and changed:
            message = f"{', '.join(changed)} has no effect without a beam search: set beams to 2 or more"
            raise RequestError(message, changed[0])


def _checked_taps(taps: object) -> Mapping[str, str] | None:
    if not isinstance(taps, Mapping) or not all(at in ("last", "new", "all") for at in taps.values()):
        raise OptionError("taps", f'must map names of taps to "last", "new" or "all"; got {taps!r}')
    return dict(taps) or None


@functools.cache
def option_names() -> tuple[str, ...]:
    """The names of all options, `max_new_tokens` first."""
    names = names_of(GenerateOptions)
    return ("max_new_tokens", *(name for name in names if name != "max_new_tokens"))


def split_chat_options(
    template: ChatTemplate | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], GenerateOptionsDict]:
    """Split options into the variables of the chat template and the options of `generate`. Raises `RequestError` for
    other names."""
    names = option_names()
    variables: frozenset[str] = frozenset()
    if template is not None:
        variables = template.variables
        template.check_variables(dict.fromkeys(set(options) & _TEMPLATE_VARIABLES - variables, True))
    check_option_names(set(options) - {"template", "cache"}, [*names, *sorted(variables - set(names))])
    template_variables = {name: value for name, value in options.items() if name in variables and name not in names}
    others: Any = {name: value for name, value in options.items() if name not in {"template", *template_variables}}
    return {**template_variables, **(options.get("template") or {})}, others
