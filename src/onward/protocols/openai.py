"""Fields that OpenAI's endpoints share."""

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import model_validator

from onward.language_model.options import GenerateOptions
from onward.protocols.body import AtMost, Body, Declared, FieldError, Label, Unserved, Whole
from onward.protocols.options import OptionsBody, body_with_options
from onward.util.options import options_of

# Names of the maximum number of new tokens.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
Length = Annotated[int | None, Declared(options_of(GenerateOptions)["max_new_tokens"])]
# A number of alternatives for each token.
LogprobCount = Annotated[int | None, Declared(options_of(GenerateOptions)["logprobs"]), AtMost("logprobs")]


class LabeledBody(OptionsBody):
    """A body with the fields that never change a response, and the hints that are not served."""

    metadata: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None
    safety_identifier: Label = None
    user: Label = None
    service_tier: Annotated[Any, Unserved(("auto", "default"), hint=True)] = None
    store: Annotated[Any, Unserved((False,), hint=True)] = None
    verbosity: Annotated[Any, Unserved(hint=True)] = None
    suffix: Annotated[Any, Unserved(("",))] = None
    web_search_options: Annotated[Any, Unserved()] = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Unserved((False,), hint=True)] = None


if TYPE_CHECKING:

    class _WithOptions(LabeledBody):
        n: int | None
        prompt_logprobs: int | None

else:
    _WithOptions = body_with_options("_WithOptions", LabeledBody)


class CompletionsBody(_WithOptions):
    """The fields that chats and completions share."""

    max_completion_tokens: Length = None
    max_tokens: Length = None
    max_new_tokens: Length = None
    stream_options: Annotated[StreamOptions | None, Whole()] = None
    return_token_ids: bool | None = None
    audio: Annotated[Any, Unserved()] = None
    functions: Annotated[Any, Unserved(([],))] = None
    function_call: Annotated[Any, Unserved(("none", "auto"))] = None
    modalities: Annotated[Any, Unserved((["text"],))] = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        lengths = {name: getattr(self, name) for name in LENGTHS if name in self.model_fields_set}
        if len(set(lengths.values())) > 1:
            raise FieldError(f"and {list(lengths)[1]} mean the same, but differ: use one", at=next(iter(lengths)))
        if self.stream_options is not None and not self.stream:
            raise FieldError("requires stream: true", at="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("is not supported in a stream: remove one of the two", at="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def set_options(self) -> dict[str, Any]:
        lengths = [getattr(self, name) for name in LENGTHS if name in self.model_fields_set]
        return {**super().set_options(), **({"max_new_tokens": lengths[0]} if lengths else {})}

    def field_of(self, option: str) -> str:
        if option == "max_new_tokens":
            return next((name for name in LENGTHS if name in self.model_fields_set), option)
        return super().field_of(option)
