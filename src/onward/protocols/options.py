"""The fields of bodies that set options of `LanguageModel.generate`, made from the declarations of the options."""

import functools
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from onward.language_model.options import GenerateOptions, option_names
from onward.protocols.body import AtMost, Declared, Expected, FieldError, Marker, ShortTexts, Validation, Values
from onward.protocols.protocol import GenerateBody
from onward.util.options import Option, options_of
from onward.util.text import brief

# Options that are no fields of bodies, or that have other names and types there.
_EXCLUDED = {"max_new_tokens", "logprobs", "draft", "stop_when", "cancel", "time_limit", "constraint", "adapter"}


class _LogitBias(Marker):
    def check(self, value: Any, validation: Validation, name: str) -> Any:
        if not isinstance(value, dict) or not all(re.fullmatch(r"[0-9]{1,18}", token) for token in value):
            raise FieldError(f"must be an object that maps token ids to numbers; got {brief(value)}")
        return {int(token): bias for token, bias in value.items()}

    def describe(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "patternProperties": {"^[0-9]{1,18}$": {"type": "number"}}, **_CLOSED}


_CLOSED: dict[str, Any] = {"additionalProperties": False}

# Any JSON Schema.
SchemaField = Annotated[dict[str, Any] | bool | None, Values("schema_values", "schema_depth")]
# The types of fields whose options take more than JSON has.
_TYPES: Mapping[str, Any] = {
    "bad_words": Annotated[
        str | list[str | list[int]] | None, Expected("a string or a list of strings or lists of ids", "invalid_value")
    ],
    "early_stopping": Annotated[bool | Literal["never"] | None, Expected('true, false or "never"', "invalid_value")],
    "json_schema": SchemaField,
    "logit_bias": Annotated[dict[int, Any] | None, _LogitBias()],
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


@functools.cache
def field_options() -> tuple[str, ...]:
    """The options of `generate` that are fields of bodies."""
    return tuple(name for name in option_names() if name not in _EXCLUDED)


def type_of(option: Option) -> Any:
    """The type of an option's field. An option takes one item in place of a list."""
    kind: Any = option.kind
    markers: tuple[Marker, ...] = _LIMITS.get(option.name, ())
    if option.name in _TYPES:
        kind = _TYPES[option.name]
    elif kind is not None and option.is_list:
        expected = Expected(f"one or a list of {_PLURALS.get(kind, 'values')}", "invalid_value")
        kind, markers = kind | list[kind] | None, (expected, *markers, Declared(option))
    elif kind is not None:
        kind, markers = kind | None, (Expected(option.expected, "invalid_value"), *markers, Declared(option))
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
