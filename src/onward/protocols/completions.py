"""/v1/completions: OpenAI's completions of texts and token ids."""

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import ValidationInfo, model_validator

from onward.protocols.answers import TextCompletion
from onward.protocols.body import FieldError, JsonSchema, Marker, Validation, validation_of
from onward.protocols.chunks import ChunkedProtocol
from onward.protocols.openai import CompletionsBody, LogprobCount
from onward.protocols.protocol import ModelContext, Prompts
from onward.util.text import brief


@dataclass(frozen=True)
class _PromptList(Marker):
    """One prompt, a text or token ids, or a list of them; always a list for the reader."""

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        limits = validation.limits
        prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
        if len(prompts) > limits.prompts:
            raise FieldError(f"has {len(prompts)} prompts; this server allows at most {limits.prompts}")
        if not prompts or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
            raise FieldError(f"must be a string, token ids, or a list of either; got {brief(value)}", "invalid_type")
        longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
        if longest > limits.ids:
            raise FieldError(f"has {longest} token ids; this server allows at most {limits.ids}")
        return prompts

    def describe(self, schema: JsonSchema) -> JsonSchema:
        prompt = [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]
        return {"anyOf": [*prompt, {"type": "array", "items": {"anyOf": prompt}, "minItems": 1}]}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionBody(CompletionsBody):
    """A body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], _PromptList()]
    logprobs: LogprobCount = None
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        texts, limit = len(self.prompt) * (self.n or 1), validation_of(info).limits.texts
        if texts > limit:
            raise FieldError(f"times the number of prompts is {texts}; this server allows at most {limit}", at="n")
        if self.best_of not in (None, self.n or 1):
            raise FieldError("is not supported unless it equals n: remove it", "unsupported_value", "best_of")
        if self.echo and self.logprobs is not None:
            if self.stream:
                raise FieldError("with logprobs is not supported in a stream: remove one of the three", at="echo")
            if self.prompt_logprobs not in (None, self.logprobs):
                problem = "differs from logprobs, which echo applies to the prompt too: use one number"
                raise FieldError(problem, at="prompt_logprobs")
        return self


class Completions(ChunkedProtocol):
    path, summary, kind = "/v1/completions", "Generate a completion.", "text_completion"
    body, response = CompletionBody, TextCompletion

    def prompts(self, body: CompletionBody, context: ModelContext) -> Prompts:
        lm, options = context.lm, {**context.options, **body.set_options()}
        if body.logprobs is not None:
            options["logprobs"] = body.logprobs
            if body.echo:
                options["prompt_logprobs"] = body.logprobs
        requests = tuple(lm.request(prompt, **options) for prompt in body.prompt)
        echoes = None
        if body.echo:
            echoes = tuple(prompt if isinstance(prompt, str) else lm.decode(prompt) for prompt in body.prompt)
        return Prompts(requests, echoes)
