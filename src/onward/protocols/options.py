"""The fields of bodies that set options of `LanguageModel.generate`, made from the declarations of the options, and
those that OpenAI's endpoints share."""

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator

from onward.language_model.options import GenerateOptions, option_names
from onward.protocols.body import (
    AtMost,
    Body,
    FieldError,
    JsonSchema,
    Label,
    Marker,
    ShortTexts,
    Unserved,
    Validation,
    Values,
    Whole,
    expected,
)
from onward.protocols.protocol import GenerateBody
from onward.util.options import Option, options_of
from onward.util.text import brief

# Options that are no fields of bodies, or that have other names and types there.
_EXCLUDED = {"max_new_tokens", "logprobs", "draft", "stop_when", "cancel", "time_limit", "constraint", "adapter"}


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict) or not all(re.fullmatch(r"[0-9]{1,18}", token) for token in value):
        raise FieldError(f"must be an object that maps token ids to numbers; got {brief(value)}")
    return {int(token): bias for token, bias in value.items()}


_BIASES: JsonSchema = {
    "type": "object",
    "patternProperties": {"^[0-9]{1,18}$": {"type": "number"}},
    "additionalProperties": False,
}
# Any JSON Schema.
SchemaField = Annotated[dict[str, Any] | bool | None, Values("schema_values", "schema_depth")]
# The types of fields whose options take more than JSON has.
_TYPES: Mapping[str, Any] = {
    "bad_words": Annotated[
        str | list[str | list[int]] | None, expected("a string or a list of strings or lists of ids", "invalid_value")
    ],
    "early_stopping": Annotated[bool | Literal["never"] | None, expected('true, false or "never"', "invalid_value")],
    "json_schema": SchemaField,
    "logit_bias": Annotated[dict[int, Any] | None, BeforeValidator(_logit_bias), WithJsonSchema(_BIASES)],
}
_GRAMMAR, _IDS = (AtMost("grammar_characters", "characters"),), (AtMost("biases", "ids"),)
# The limits of options.
_LIMITS: Mapping[str, tuple[Marker, ...]] = {
    "bad_words": (AtMost("bad_words", "entries"), ShortTexts("bad_word_characters")),
    "beams": (AtMost("beams"),),
    "choice": (AtMost("choices", "texts"),),
    "dry_sequence_breakers": _IDS,
    "eos": _IDS,
    "grammar": _GRAMMAR,
    "logit_bias": (AtMost("biases", "entries"),),
    "n": (AtMost("n"),),
    "prompt_logprobs": (AtMost("logprobs"),),
    "regex": _GRAMMAR,
    "stop": (AtMost("stop_strings", "strings"), ShortTexts("stop_characters")),
}
_PLURALS = {int: "ids", str: "strings"}


@dataclass(frozen=True)
class Declared(Marker):
    """A value, or a list of values, within the bounds of a declared option."""

    option: Option

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        for item in value if isinstance(value, list) else () if value is None else (value,):
            if not self.option.admits(item):
                raise FieldError(f"must be {self.option.expected}; got {brief(item)}{self.option.hint}")
        return value

    def describe(self, schema: JsonSchema) -> JsonSchema:
        names = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
        bounds = {keyword: getattr(self.option, name) for name, keyword in names.items()}
        for branch in schema.get("anyOf", [schema]):
            value = branch.get("items", branch) if branch.get("type") == "array" else branch
            if value.get("type") in ("integer", "number"):
                value |= {keyword: bound for keyword, bound in bounds.items() if bound is not None}
            elif value.get("type") == "string" and self.option.low:
                value["minLength"] = int(self.option.low)
        return schema


@functools.cache
def field_options() -> tuple[str, ...]:
    """The options of `generate` that are fields of bodies."""
    return tuple(name for name in option_names() if name not in _EXCLUDED)


def type_of(option: Option) -> Any:
    """The type of an option's field. An option takes one item in place of a list."""
    kind: Any = option.kind
    markers: tuple[Any, ...] = _LIMITS.get(option.name, ())
    if option.name in _TYPES:
        kind = _TYPES[option.name]
    elif kind is not None and option.is_list:
        one_or_several = expected(f"one or a list of {_PLURALS.get(kind, 'values')}", "invalid_value")
        kind, markers = kind | list[kind] | None, (one_or_several, *markers, Declared(option))
    elif kind is not None:
        kind, markers = kind | None, (expected(option.expected, "invalid_value"), *markers, Declared(option))
    else:  # the option's own code validates it
        kind = Any
    for marker in markers:
        kind = Annotated[kind, marker]
    return kind


class OptionsBody(GenerateBody):
    """A body with fields for options, which `body_with_options` adds."""

    def set_options(self) -> dict[str, Any]:
        """The options that the body sets."""
        return {name: getattr(self, name) for name in field_options() if name in self.model_fields_set}


def body_with_options(name: str, base: type[OptionsBody], without: Collection[str] = ()) -> type[OptionsBody]:
    """A class of bodies with a field for each option. base: its base class. without: options that are no fields."""
    declared = options_of(GenerateOptions)
    fields: dict[str, Any] = {}
    for option in field_options():
        if option not in without:
            fields[option] = (type_of(declared[option]), Field(None, description=declared[option].help))
    return create_model(name, __base__=base, **fields)


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
    stream_options: Annotated[StreamOptions | None, Whole] = None
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
