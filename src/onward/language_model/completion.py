"""The results of a request: pieces, the completion, and their timing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from onward.chat import AssistantMessage, MessageDelta
from onward.constraints import JsonSchema
from onward.decoding.sequence import FinishReason, StoppedBy
from onward.decoding.speculation import Speculation
from onward.errors import RequestError
from onward.language_model.request import Request
from onward.sampling import TokenLogprobs


class Piece(NamedTuple):
    """One streamed token.

    text: the text that became final with it; empty while a character or a possible stop string is incomplete.
    token_id: the token.
    logprobs: of the token and of the most likely ids, if requested.
    choice: the index of its text in `Completion.choices`.
    message: in a chat, the token's part of the message; the parts add up to `Completion.message`.
    taps: the values [...] at taps with "new" or "all", at the position whose logits chose the token, if requested.
    drafted: whether it was a draft that the model accepted (docs/speculation.md). Comparisons ignore it, because it
        describes how the token was computed, and taps.
    weights_version: that of the weights that computed it (`LanguageModel.update_weights`). Comparisons ignore it too.
    """

    text: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    choice: int = 0
    message: MessageDelta | None = None
    taps: Mapping[str, Tensor] | None = None
    drafted: bool = False
    weights_version: int = 0

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self[:-3], other[:-3] if isinstance(other, Piece) else other)

    def __ne__(self, other: object) -> bool:  # tuple's own compares all fields
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-3])


@dataclass(frozen=True)
class Timing:
    """Times of one completion in milliseconds. Rows of a batch run together, so their times overlap.

    prefill_ms: the time until the first token. In a resumed request, emitted tokens count as prompt.
    per_token_ms: one entry for each token after the first; the tokens of one step share its time.
    total_ms: the sum of both.
    tokens_per_second: tokens after the first over their time; 0 if there are none.
    """

    prefill_ms: float
    per_token_ms: list[float]
    total_ms: float
    tokens_per_second: float

    @classmethod
    def of(cls, laps: Sequence[float], waited: float = 0.0) -> "Timing":
        """laps: the seconds of each token. waited: without tokens, the seconds of all steps."""
        per_token = [1e3 * lap for lap in laps[1:]]
        prefill = 1e3 * (laps[0] if laps else waited)
        rest = sum(per_token)
        return cls(prefill, per_token, prefill + rest, 1e3 * len(per_token) / rest if per_token else 0.0)

    def __repr__(self) -> str:
        return (
            f"Timing(prefill_ms={self.prefill_ms:.1f}, {len(self.per_token_ms)} more tokens in "
            f"{sum(self.per_token_ms):.1f} ms, {self.tokens_per_second:.1f} tokens/s)"
        )


@dataclass(frozen=True)
class Completion:
    """A finished text.

    text: the generated text, without the prompt, the ending id and the stop string.
    token_ids: all generated ids, including the ending one.
    finish_reason: "stop" (an eos id, a stop string, `stop_when`, or a complete constraint), "length" (max_new_tokens),
        "time" (time_limit) or "cancelled" (cancel).
    stopped_by: with "stop", the ending id, the stop string, or the function `stop_when`; None otherwise, and for a
        complete constraint.
    message: the parts of a chat's answer: content, reasoning, tool calls (docs/chat.md); None without a chat.
    reasoning_tokens: in a chat, how many of `token_ids` have text of the reasoning, without markers such as "<think>".
    taps: the values at each requested tap, in the model's dtype, on the CPU (docs/hidden-states.md); None unless
        requested. Comparisons ignore them.
    embedding: of a request for an embedding, float32 [D], or for a score, float32 [].
    timing: see `Timing`.
    prompt_tokens: the number of prompt ids.
    cached_tokens: how many of the prompt's ids the cache held already.
    seed: the seed of the sampling, the request's or a fresh one; it reproduces the text. None with greedy decoding.
    logprobs: for each of `token_ids`; None unless requested.
    prompt_logprobs: for each prompt id, None for the first, which nothing predicts; None unless requested.
    score: the sum of logprobs / length^length_penalty of a beam; None without beams.
    others: the prompt's other texts, for n > 1; see `choices`.
    speculation: how many ids were drafted and accepted, including those that a constraint forced; None without a draft
        and a constraint.
    json_schema: the schema that the text meets; None without one.
    weights_versions: the versions of the weights that computed the tokens (`LanguageModel.update_weights`), as runs:
        the index of a first token, and the version from there on. [(0, 3), (17, 4)]: version 4 from the 18th token on.
    request: the prompt's ids and the options, without `draft` and `cancel`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timing: Timing
    prompt_tokens: int
    seed: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    score: float | None = None
    others: list["Completion"] = field(default_factory=list)
    cached_tokens: int = 0
    speculation: Speculation | None = None
    stopped_by: StoppedBy | None = None
    json_schema: JsonSchema | None = None
    message: AssistantMessage | None = None
    reasoning_tokens: int | None = None
    weights_versions: list[tuple[int, int]] = field(default_factory=list)
    taps: Mapping[str, Tensor] | None = field(default=None, compare=False)
    embedding: Tensor | None = field(default=None, compare=False)
    request: Request | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 40 else f"{self.text[:39]}…"
        facts = [f"{len(self.token_ids)} tokens", f"finish_reason={self.finish_reason!r}"]
        facts += [] if self.seed is None else [f"seed={self.seed}"]
        facts += [f"{len(self.others)} others"] if self.others else []
        return f"Completion({text!r}, {', '.join(facts)})"

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt; empty if the completion has no `request`."""
        return [] if self.request is None else list(self.request.prompt)

    @property
    def choices(self) -> list["Completion"]:
        """All texts of this prompt, starting with this one. Samples are in order, beams best first."""
        return [self, *self.others]

    @property
    def parsed(self) -> Any:
        """The JSON value of a text with a `json_schema`, or an instance of the pydantic class. Raises `RequestError`
        without a json_schema, for an incomplete text, and if the class rejects the value."""
        if self.json_schema is None:
            raise RequestError("this text has no json_schema to parse it with: give json_schema= to the request")
        if self.finish_reason != "stop":
            raise RequestError(
                f"the JSON is incomplete, because the text ended by {self.finish_reason!r} after {len(self.token_ids)} "
                "tokens: give it more room (max_new_tokens, time_limit)"
            )
        if self.message is not None and self.message.tool_calls and self.message.content is None:
            raise RequestError("the answer has tool calls, but no text to parse: see message.tool_calls")
        content = None if self.message is None else self.message.content  # without the reasoning
        return self.json_schema.parsed(self.text if content is None else content)
