"""The fields of bodies that set options of `LanguageModel.generate`, made from the declarations of the options, and
those that OpenAI's endpoints share."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator

from onward.language_model.options import GenerateOptions, option_names
from onward.language_model.steering import changed
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
from onward.protocols.protocol import GenerateBody, ModelContext
from onward.util.options import Option, options_of
from onward.util.text import brief
from onward.util.text_input import TextError, parse_json

DECLARED = options_of(GenerateOptions)
# Options that are no fields of bodies, or that have other names and types there.
_EXCLUDED = {
    *("max_new_tokens", "logprobs", "taps", "steer", "prompt_embeds", "draft", "stop_when", "cancel", "time_limit"),
    *("constraint", "adapter"),
}
# Options of completions that responses and messages do not have, or have under other names.
OF_TEXTS = ("n", "beams", "length_penalty", "early_stopping", "stop", "prompt_logprobs", "sampling_logprobs")


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
SchemaField = Annotated[
    dict[str, Any] | bool | None, expected("an object, true or false"), Values("schema_values", "schema_depth")
]
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
    "cache_salt": (AtMost("stop_characters", "characters"),),
    "choice": (AtMost("choices", "texts"),),
    "dry_sequence_breakers": _IDS,
    "eos": _IDS,
    "grammar": _GRAMMAR,
    "logit_bias": (AtMost("biases", "entries"),),
    "n": (AtMost("n"),),
    "prompt_logprobs": (AtMost("logprobs"),),
    "reasoning_budget_message": (AtMost("stop_characters", "characters"),),
    "regex": _GRAMMAR,
    "stop": (AtMost("stop_strings", "strings"), ShortTexts("stop_characters")),
}
_PLURALS = {int: "ids", str: "strings"}
# Meanings of -1, which other servers use for these values.
_MINUS_ONE: Mapping[str, Any] = {"seed": None, "top_k": 0}


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


@dataclass(frozen=True)
class MinusOne(Marker):
    """A number in which -1 stands for another value."""

    means: Any

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        return self.means if type(value) is int and value == -1 else value

    def describe(self, schema: JsonSchema) -> JsonSchema:
        for branch in schema.get("anyOf", [schema]):
            if branch.get("type") == "integer":
                branch["minimum"] = -1
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
    if option.name in _MINUS_ONE:
        markers = (*markers, MinusOne(_MINUS_ONE[option.name]))
    for marker in markers:
        kind = Annotated[kind, marker]
    return kind


class ControlVector(Body):
    """A control vector of the server, by name. scale, at: as in `onward.Steer`."""

    name: str
    scale: float | None = None
    at: Literal["all", "prompt", "new"] | None = None


class OptionsBody(GenerateBody):
    """A body with fields for options, which `body_with_options` adds."""

    control_vector: str | ControlVector | None = None

    def set_options(self) -> dict[str, Any]:
        """The options that the body sets."""
        return {name: getattr(self, name) for name in field_options() if name in self.model_fields_set}

    def options(self, context: ModelContext) -> dict[str, Any]:
        """The options of a request: those that the body sets, and the server's."""
        options = {**context.options, **self.set_options()}
        if (chosen := self.control_vector) is not None:
            chosen = ControlVector(name=chosen) if isinstance(chosen, str) else chosen
            scale, at = 1.0 if chosen.scale is None else chosen.scale, chosen.at or "all"
            options["steer"] = changed(context.lm.adapters.control_vector(chosen.name), scale=scale, at=at)
        return options

    def field_of(self, option: str) -> str:
        return "control_vector" if option == "steer" else super().field_of(option)


def body_with_options(name: str, base: type[OptionsBody], without: Collection[str] = ()) -> type[OptionsBody]:
    """A class of bodies with a field for each option. base: its base class. without: options that are no fields."""
    fields: dict[str, Any] = {}
    for option in field_options():
        if option not in without:
            fields[option] = (type_of(DECLARED[option]), Field(None, description=DECLARED[option].help))
    return create_model(name, __base__=base, **fields)


# Fields that set the same option.
_SAME = {
    "max_new_tokens": ("max_completion_tokens", "max_tokens", "max_new_tokens"),
    "min_new_tokens": ("min_tokens", "min_new_tokens"),
}
BUDGETS = ("reasoning_budget", "thinking_token_budget", "thinking_budget_tokens")
Length = Annotated[int | None, Declared(DECLARED["max_new_tokens"])]
# -1: up to the end of the context.
_AnyLength = Annotated[Length, MinusOne(None)]
Budget = Annotated[int | None, Declared(DECLARED["reasoning_budget"])]
# A number of alternatives for each token.
LogprobCount = Annotated[int | None, Declared(DECLARED["logprobs"]), AtMost("logprobs")]


def synonyms(body: Body, names: Sequence[str]) -> dict[str, Any]:
    """The values of those of several fields with one meaning that a body sets. Raises `FieldError` if they differ."""
    values = {name: getattr(body, name) for name in names if name in body.model_fields_set}
    if len(set(values.values())) > 1:
        raise FieldError(f"and {list(values)[1]} mean the same, but differ: use one", at=next(iter(values)))
    return values


# A receipt of the text, for `onward verify` (docs/receipts.md).
ReceiptField = Annotated[bool | None, Field(description="Return a receipt of each text, which onward verify checks.")]


class LabeledBody(OptionsBody):
    """A body with the fields that never change a text, and the hints that are not served."""

    receipt: ReceiptField = None
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
        json_schema: Any

else:
    _WithOptions = body_with_options("_WithOptions", LabeledBody)


def _read_schema(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except TextError as error:
        raise FieldError(f"must be a JSON Schema, also as a text; got {brief(value)} ({error})") from None


# A JSON Schema, or its text.
_SchemaText = Annotated[SchemaField, BeforeValidator(_read_schema), WithJsonSchema({})]
if TYPE_CHECKING:
    _Regex: TypeAlias = str | None
    _Choice: TypeAlias = str | list[str] | None
    _Grammar: TypeAlias = str | None
else:
    _Regex, _Choice, _Grammar = (type_of(DECLARED[name]) for name in ("regex", "choice", "grammar"))


class StructuredOutputs(Body):
    """vLLM's constraints: one of them."""

    json_: _SchemaText = Field(None, alias="json")
    regex: _Regex = None
    choice: _Choice = None
    grammar: _Grammar = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self._values) != 1:
            raise FieldError("must have exactly one of json, regex, choice, grammar and json_object: true")
        return self

    @property
    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}

    @property
    def option(self) -> tuple[str, Any]:
        """The option that it sets, and its value."""
        ((name, value),) = self._values.items()
        if name == "json_object":
            return "json_schema", {"type": "object"}
        return ("json_schema" if name == "json_" else name), value


# vLLM's fields for constraints, and the options that they set.
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class CompletionsBody(_WithOptions):
    """The fields that chats and completions share."""

    max_completion_tokens: _AnyLength = None
    max_tokens: _AnyLength = None
    max_new_tokens: _AnyLength = None
    min_tokens: Annotated[int | None, Declared(DECLARED["min_new_tokens"])] = None
    stop_token_ids: Annotated[list[int] | None, AtMost("biases", "ids"), Declared(DECLARED["eos"])] = None
    guided_json: _SchemaText = None
    guided_regex: _Regex = None
    guided_choice: _Choice = None
    guided_grammar: _Grammar = None
    structured_outputs: Annotated[StructuredOutputs | None, Whole] = None
    stream_options: Annotated[StreamOptions | None, Whole] = None
    return_token_ids: bool | None = None
    skip_special_tokens: Annotated[Any, Unserved((True,))] = None
    spaces_between_special_tokens: Annotated[Any, Unserved((True, False))] = None
    include_stop_str_in_output: Annotated[Any, Unserved((False,))] = None
    audio: Annotated[Any, Unserved()] = None
    functions: Annotated[Any, Unserved(([],))] = None
    function_call: Annotated[Any, Unserved(("none", "auto"))] = None
    modalities: Annotated[Any, Unserved((["text"],))] = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for names in _SAME.values():
            synonyms(self, names)
        if len(constraints := self.constraints()) > 1:
            first, second, *_ = constraints
            raise FieldError(f"and {second} exclude each other: use one", at=first)
        if self.stream_options is not None and not self.stream:
            raise FieldError("requires stream: true", at="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("is not supported in a stream: remove one of the two", at="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def constraints(self) -> dict[str, tuple[str, Any]]:
        """The fields of the body that constrain the text, each with the option that it sets and its value."""
        names = {**{name: name for name in _GUIDED.values()}, **_GUIDED}
        found = {field: (name, getattr(self, field)) for field, name in names.items() if field in self.model_fields_set}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.option
        return found

    def set_options(self) -> dict[str, Any]:
        same = {option: next(iter(values.values())) for option in _SAME if (values := synonyms(self, _SAME[option]))}
        return {**super().set_options(), **same, **dict(self.constraints().values())}

    def options(self, context: ModelContext) -> dict[str, Any]:
        """Other ids that end the text are added to those of `eos`, which `ignore_eos` drops."""
        options, defaults = super().options(context), context.lm.defaults
        if self.stop_token_ids:
            ignored = options.get("ignore_eos", defaults.ignore_eos)
            eos = () if ignored else options.get("eos", defaults.eos) or ()
            eos = (eos,) if isinstance(eos, int) else eos
            options |= {"eos": (*eos, *self.stop_token_ids), "ignore_eos": False}
        return options

    def field_of(self, option: str) -> str:
        if option == "eos" and self.stop_token_ids and "eos" not in self.model_fields_set:
            return "stop_token_ids"
        constraints = (field for field, (name, _) in self.constraints().items() if name == option)
        same = synonyms(self, _SAME[option]) if option in _SAME else {}
        return next(iter([*same, *constraints]), super().field_of(option))
