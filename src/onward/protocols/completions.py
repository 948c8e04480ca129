"""/v1/completions: OpenAI's completions of texts and token ids."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema, model_validator

from onward.errors import TokenizerError
from onward.language_model import Completion, LanguageModel, Piece, Request, infill_request
from onward.protocols.body import AtMost, BodyError, FieldError, JsonSchema, validation_of
from onward.protocols.choices import Choice, ChoicesProtocol, ChoicesResponse, ChoiceStream
from onward.protocols.logprobs import finite, logprob_entries, prompt_logprobs
from onward.protocols.options import CompletionsBody, LogprobCount
from onward.protocols.protocol import ModelContext, ParsedBody, Prompts
from onward.sampling import TokenLogprobs
from onward.tokenizer.text_stream import TokenText, token_texts
from onward.util.text import brief


def listed_prompts(value: Any, info: ValidationInfo) -> list[Any]:
    """One prompt, a text or token ids, or a list of them, as a list."""
    limits = validation_of(info).limits
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    if len(prompts) > limits.prompts:
        raise FieldError(f"has {len(prompts)} prompts; this server allows at most {limits.prompts}")
    if not prompts or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise FieldError(f"must be a string, token ids, or a list of either; got {brief(value)}", "invalid_type")
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
    if longest > limits.ids:
        raise FieldError(f"has {longest} token ids; this server allows at most {limits.ids}")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


_PROMPT: list[JsonSchema] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
]
PROMPTS: JsonSchema = {"anyOf": [*_PROMPT, {"type": "array", "items": {"anyOf": _PROMPT}, "minItems": 1}]}


class CompletionBody(CompletionsBody):
    """A body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(listed_prompts), WithJsonSchema(PROMPTS)]
    logprobs: LogprobCount = None
    echo: bool | None = None
    suffix: Annotated[str | None, AtMost("text_characters", "characters")] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        texts, limit = len(self.prompt) * (self.n or 1), validation_of(info).limits.texts
        if texts > limit:
            raise FieldError(f"times the number of prompts is {texts}; this server allows at most {limit}", at="n")
        if self.best_of not in (None, self.n or 1):
            raise FieldError("is not supported unless it equals n: remove it", "unsupported_value", "best_of")
        if self.suffix and self.echo:
            raise FieldError("cannot be combined with suffix: remove one of the two", at="echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise FieldError("needs prompts as texts: remove it, or decode the token ids", at="suffix")
        if self.echo and self.logprobs is not None:
            if self.stream:
                raise FieldError("with logprobs is not supported in a stream: remove one of the three", at="echo")
            if self.prompt_logprobs not in (None, self.logprobs):
                problem = "differs from logprobs, which echo applies to the prompt too: use one number"
                raise FieldError(problem, at="prompt_logprobs")
        return self


class TextChoice(Choice):
    """A choice of a completion."""

    text: str


class TextCompletion(ChoicesResponse):
    """A response of /v1/completions, for the OpenAPI document."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


def _logprobs(
    tokens: Sequence[TokenText],
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offset: int = 0,
    *,
    with_content: bool = False,
) -> dict[str, Any]:
    """The logprobs of a completion's tokens. offset: of the first token in the text. "ids" is an extension, and so are
    "sampling_logprobs" and "support", which are only there if they were requested.

    with_content: add another one, "content", in the format of chats: with the ids of alternatives, which a mapping by
        text cannot tell apart.
    """
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token.text))
    sampled = [entry for entry in entries if entry is not None and entry.sampling is not None]
    of_sampling = {
        "sampling_logprobs": [
            None if entry is None or entry.sampling is None else finite(entry.sampling) for entry in entries
        ],
        "support": [None if entry is None else entry.support for entry in entries],
    }
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if entry is None else finite(entry.chosen) for entry in entries],
        "top_logprobs": [
            None
            if entry is None
            else {other.text: finite(logprob) for other, (_, logprob) in zip(token.top, entry.top, strict=True)}
            for token, entry in zip(tokens, entries, strict=True)
        ],
        "text_offset": offsets[: len(tokens)],
        "ids": list(ids),
        **(of_sampling if sampled else {}),
        **({"content": logprob_entries(tokens, ids, entries)} if with_content else {}),
    }


class _TextStream(ChoiceStream):
    opening, closing, empty = '"text":', "", '"text":""'
    _characters = 0  # sent
    _offset = 0  # of the next token in the text

    def joined(self, pieces: Sequence[Piece]) -> str:
        text = pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces])
        self._characters += len(text)
        return text

    def unsent(self, completion: Completion) -> str:
        return completion.text[self._characters :]  # of beam search, or held back at a cut

    def plain(self, text: str) -> str:
        return text

    def fields(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return _logprobs(tokens, ids, entries, offset, with_content=self._with_ids)


def _infill(lm: LanguageModel, prefix: str, suffix: str, options: Mapping[str, Any]) -> Request:
    try:
        return infill_request(lm, prefix, suffix, **options)
    except TokenizerError as error:
        raise BodyError(str(error), "suffix", "unsupported_value") from error


class Completions(ChoicesProtocol):
    path, summary, kind = "/v1/completions", "Generate a completion.", "text_completion"
    body, response = CompletionBody, TextCompletion
    prefix, chunk_kind = "cmpl", "text_completion"

    def prompts(self, body: CompletionBody, context: ModelContext) -> Prompts:
        lm, options = context.lm, body.options(context)
        if body.logprobs is not None:
            options["logprobs"] = body.logprobs
            if body.echo:
                options["prompt_logprobs"] = body.logprobs
        if body.suffix:
            return Prompts(tuple(_infill(lm, str(prompt), body.suffix, options) for prompt in body.prompt))
        requests = tuple(lm.request(prompt, **options) for prompt in body.prompt)
        echoes = None
        if body.echo:
            echoes = tuple(prompt if isinstance(prompt, str) else lm.decode(prompt) for prompt in body.prompt)
        return Prompts(requests, echoes)

    def choice(self, body: ParsedBody, at: int, completion: Completion, text: Completion) -> dict[str, Any]:
        request, echo, tokenizer = body.requests[at], None if body.echoes is None else body.echoes[at], body.tokenizer
        choice: dict[str, Any] = {"text": (echo or "") + text.text, "logprobs": None}
        if text.logprobs is not None:
            ids, entries = text.token_ids, list[TokenLogprobs | None](text.logprobs)
            tokens = token_texts(ids, entries, request.prompt, tokenizer)
            if echo is not None and completion.prompt_logprobs is not None:
                tokens = [*token_texts(request.prompt, completion.prompt_logprobs, (), tokenizer), *tokens]
                ids, entries = [*request.prompt, *ids], [*completion.prompt_logprobs, *entries]
            choice["logprobs"] = _logprobs(tokens, ids, entries, with_content=body.values.return_token_ids)
        if body.values.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(request, completion, tokenizer)
        return choice

    def stream_of(self, body: ParsedBody) -> type[ChoiceStream]:
        return _TextStream
