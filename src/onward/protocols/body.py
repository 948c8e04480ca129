"""Request bodies as pydantic models: types, limits, and errors that name the field.

A field is served as its API's reference says, or is refused by name: none is silently ignored. `Body` forbids unknown
fields and converts nothing. Lengths and numbers are checked against `Limits` before the values are looked at, so that
validating a body takes time in proportion to its length.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import core_schema

from onward.errors import RequestError
from onward.protocols.errors import BodyError
from onward.protocols.limits import Limits
from onward.util.option_names import check_option_names
from onward.util.options import Option
from onward.util.text import brief

JsonSchema = dict[str, Any]


class Body(BaseModel):
    """A request body, or an object in one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass
class Validation:
    """The context of a validation. limits: of a body. ignore_unsupported: drop unsupported hints, and collect their
    names in `ignored`."""

    limits: Limits = field(default_factory=Limits)
    ignore_unsupported: bool = False
    ignored: list[str] = field(default_factory=list)


_DEFAULT = Validation()
# The limits in JSON Schemas.
_documented: ContextVar[Limits] = ContextVar("documented", default=_DEFAULT.limits)


@contextlib.contextmanager
def documented(limits: Limits) -> Iterator[None]:
    """Make JSON Schemas of bodies with these limits."""
    token = _documented.set(limits)
    try:
        yield
    finally:
        _documented.reset(token)


def validation_of(info: ValidationInfo) -> Validation:
    """The context of a validator."""
    return info.context or _DEFAULT


class FieldError(ValueError):  # pydantic collects these
    """A field has an invalid value. problem: the message after the field's name. at: place in the value, such as "[2]".
    code: OpenAI's error code. inner: place within `at`, for the message only."""

    def __init__(self, problem: str, code: str = "invalid_value", at: str = "", inner: str = "") -> None:
        super().__init__(problem)
        self.problem, self.code, self.at, self.inner = problem, code, at, inner


BodyT = TypeVar("BodyT", bound=Body)


def validated(model: type[BodyT], body: object, validation: Validation) -> BodyT:
    """Validate the fields of a body; null means that a field is absent. Raises `BodyError`, which names the first
    invalid field."""
    if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise BodyError(f"the body must be a JSON object; got {type(body).__name__}", code="invalid_type")
    if len(body) > validation.limits.fields:
        raise BodyError(f"the body has {len(body)} fields; at most {validation.limits.fields} are allowed")
    fields = {name: value for name, value in body.items() if value is not None}
    try:
        return model.model_validate(fields, context=validation)
    except ValidationError as error:
        place, problem = _first(error)
    if problem.code == "unknown_parameter" and len(place) == 1:
        try:
            check_option_names(map(str, place), _known(model))
        except RequestError as unknown:
            raise BodyError(str(unknown), path_of(place), problem.code) from None
    at = f"{path_of(place)}{problem.at}"
    message = f"{at}{problem.inner} {problem.problem}".strip()
    raise BodyError(message, at.removeprefix(".") or None, problem.code)


def _first(error: ValidationError) -> tuple[tuple[str | int, ...], FieldError]:
    """The first problem of an error, unknown fields before others, and its place."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    place, value, kind = first["loc"], first["input"], first["type"]
    if isinstance(problem := first.get("ctx", {}).get("error"), FieldError):
        return place, problem
    if kind == "extra_forbidden":
        return place, FieldError("is not a field: remove it", "unknown_parameter")
    if kind == "missing" and len(place) == 1:
        return place, FieldError("is required", "missing_required_parameter")
    if kind == "missing":
        return place[:-1], FieldError(f"must have {str(place[-1])!r}; got {brief(value)}", "invalid_type")
    if kind in _EXPECTED:
        return place, FieldError(f"must be {_EXPECTED[kind]}; got {brief(value)}", "invalid_type")
    return place, FieldError(f"is invalid: {first['msg']}; got {brief(value)}")


_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


@functools.cache
def _known(model: type[Body]) -> tuple[str, ...]:
    return tuple(model.model_fields)


def path_of(place: Sequence[str | int]) -> str:
    """A path such as "messages[0].content"."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")[:200]


class Marker:
    """An annotation of a field's type with a check of its own."""

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        """The value to validate further. Raises `FieldError`."""
        raise NotImplementedError

    def describe(self, schema: JsonSchema) -> JsonSchema:
        """The JSON Schema of the field, from that of its type."""
        return schema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def check(value: Any, info: ValidationInfo) -> Any:
            return self.check(value, validation_of(info), info.field_name or "")

        return core_schema.with_info_before_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return self.describe(handler(schema))


_LENGTHS = {"array": "maxItems", "object": "maxProperties"}


@dataclass(frozen=True)
class AtMost(Marker):
    """A list or an object with a maximum length; with the unit "characters", a text; without a unit, a number with a
    maximum value.

    limit: name of the maximum in `Limits`. unit: a plural noun for the error.
    """

    limit: str
    unit: str = ""

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        limit = getattr(validation.limits, self.limit)
        if not self.unit:
            if type(value) is int and value > limit:
                raise FieldError(f"is {brief(value)}; this server allows at most {limit}")
        elif isinstance(value, str if self.unit == "characters" else list | dict) and len(value) > limit:
            raise FieldError(f"has {len(value)} {self.unit}; this server allows at most {limit}")
        return value

    def describe(self, schema: JsonSchema) -> JsonSchema:
        keywords = {"": {"integer": "maximum"}, "characters": {"string": "maxLength"}}.get(self.unit, _LENGTHS)
        for branch in schema.get("anyOf", [schema]):
            if (keyword := keywords.get(branch.get("type"))) is not None:
                branch[keyword] = getattr(_documented.get(), self.limit)
        return schema


@dataclass(frozen=True)
class ShortTexts(Marker):
    """A text, or a list of texts or ids, each of a maximum length. limit: its name in `Limits`."""

    limit: str

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        limit = getattr(validation.limits, self.limit)
        each = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        longest = max((len(text) for text in each if isinstance(text, str | list)), default=0)
        if longest > limit:
            raise FieldError(f"has an entry of {longest} characters or ids; this server allows at most {limit}")
        return value


@dataclass(frozen=True)
class Values(Marker):
    """JSON with a maximum number of values in it, and optionally a maximum depth.

    limit, depth: names of the maxima in `Limits`.
    """

    limit: str
    depth: str = ""

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        most = getattr(validation.limits, self.limit)
        deepest = getattr(validation.limits, self.depth) if self.depth else 1 << 20
        level, count, depth = [value], 0, 0
        while level:
            inner: list[Any] = []
            for each in level:
                if isinstance(each, dict):
                    inner += each.values()
                elif isinstance(each, list):
                    inner += each
                if count + len(inner) > most:
                    raise FieldError(f"has more than {most} values, the most that this server allows")
            count += len(inner)
            level, depth = inner, depth + 1
            if depth > deepest + 1:
                raise FieldError(f"is nested deeper than {deepest} levels, the most that this server allows")
        return value


@dataclass(frozen=True)
class Expected(Marker):
    """A value of several types, with one error for all of them. text: after "must be". code: of the error."""

    text: str
    code: str = "invalid_type"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def check(value: Any, validate: Callable[[Any], Any]) -> Any:
            try:
                return validate(value)
            except ValidationError:
                raise FieldError(f"must be {self.text}; got {brief(value)}", self.code) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))


@dataclass(frozen=True)
class Whole(Marker):
    """An object whose errors blame the whole field, and name the place in it in the message."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def check(value: Any, validate: Callable[[Any], Any]) -> Any:
            try:
                return validate(value)
            except ValidationError as error:
                place, problem = _first(error)
            inner = f".{path_of(place)}{problem.at}{problem.inner}".rstrip(".")
            raise FieldError(problem.problem, problem.code, inner=inner)

        return core_schema.no_info_wrap_validator_function(check, handler(source))


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
class Unserved(Marker):
    """A field that this server doesn't serve. allowed: values without effect, which are accepted. hint: whether it
    constrains no output, so that `--ignore-unsupported` may drop it."""

    allowed: tuple[Any, ...] = ()
    hint: bool = False

    def check(self, value: Any, validation: Validation, name: str) -> Any:
        if value is None or any(value == each and type(value) is type(each) for each in self.allowed):
            return value
        if self.hint and validation.ignore_unsupported:
            validation.ignored.append(name)
            return None
        values = " or ".join(map(_json, self.allowed))
        raise FieldError(f"is not supported: remove it{values and f', or use {values}'}", "unsupported_value")

    def describe(self, schema: JsonSchema) -> JsonSchema:
        return {"enum": [*self.allowed, None], "description": "Not supported."}


def _json(value: Any) -> str:
    return repr(value) if not isinstance(value, bool) else str(value).lower()


class _Label(Marker):
    def check(self, value: Any, validation: Validation, name: str) -> Any:
        return value

    def describe(self, schema: JsonSchema) -> JsonSchema:
        return {"description": "A label, without effect."}


# A field that never changes a response.
Label = Annotated[Any, _Label()]
