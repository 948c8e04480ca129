"""Request bodies as pydantic models: errors in OpenAI's format that name the field, limits, and types.

A field is served as its API's reference says, or is refused by name: none is silently ignored. `Body` forbids unknown
fields and converts nothing. Lengths and numbers are checked against `Limits` before the values are looked at, so that
validating a body takes time in proportion to its length.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import core_schema

from onward.errors import ContextOverflowError, EngineBusyError, EngineError, OnwardError, RequestError, TokenizerError
from onward.util.option_names import check_option_names
from onward.util.options import option, options_of
from onward.util.text import brief

JsonSchema = dict[str, Any]


class Body(BaseModel):
    """A request body, or an object in one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_MAX_LENGTH = 1000  # characters of a message, which may quote the body
# OpenAI's types and codes of errors, by status; other errors are invalid requests.
_KINDS = {
    429: ("rate_limit_error", "engine_busy"),
    500: ("server_error", "server_error"),
    503: ("server_error", "engine_unavailable"),
}


class BodyError(RequestError):
    """A request body is invalid or unsupported. param: the field. code: OpenAI's error code. status: of HTTP."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message, param)
        self.code, self.status = code, status

    @property
    def param(self) -> str | None:
        """The field to blame, if there is one."""
        return self.option

    def __reduce__(self) -> tuple[type["BodyError"], tuple[str, str | None, str, int]]:
        return type(self), (str(self), self.option, self.code, self.status)


def status_of(error: OnwardError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, BodyError):
        return error.status
    if isinstance(error, RequestError | TokenizerError):
        return 400
    if isinstance(error, EngineBusyError):
        return 429
    return 503 if isinstance(error, EngineError) else 500


def error_fields(error: OnwardError) -> dict[str, Any]:
    """The object under "error" in a response."""
    kind, code = _KINDS.get(status_of(error), ("invalid_request_error", None))
    if isinstance(error, BodyError):
        code = error.code
    elif isinstance(error, ContextOverflowError):
        code = "context_length_exceeded"
    message = str(error)
    return {
        "message": message if len(message) <= _MAX_LENGTH else f"{message[:_MAX_LENGTH]}…",
        "type": kind,
        "param": error.option if isinstance(error, RequestError) else None,
        "code": code,
    }


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most of each thing that one body may ask for or contain. `onward serve --limit NAME=N` changes one.

    Raises:
        RequestError: a value that is not a whole number of 1 or more.
    """

    fields: int = option(256, low=1, help="Fields of a body.")
    n: int = option(128, low=1, help="`n`: texts for one prompt.")
    beams: int = option(128, low=1, help="`beams`.")
    prompts: int = option(256, low=1, help="Prompts in one body.")
    texts: int = option(1024, low=1, help="Prompts times `n`.")
    ids: int = option(1_000_000, low=1, help="Token ids in a prompt or in /detokenize.")
    messages: int = option(4096, low=1, help="Messages of a chat, and items of a response's `input`.")
    parts: int = option(1024, low=1, help="Parts of a message's content.")
    tools: int = option(512, low=1, help="Tools.")
    schema_values: int = option(20_000, low=1, help="Values in a JSON Schema, or in all schemas of `tools`.")
    schema_depth: int = option(64, low=1, help="Objects and lists within each other in a JSON Schema.")
    grammar_characters: int = option(500_000, low=1, help="Characters of `regex` and `grammar`.")
    choices: int = option(4096, low=1, help="Texts of `choice`.")
    stop_strings: int = option(64, low=1, help="Strings of `stop`.")
    stop_characters: int = option(
        1024, low=1, help="Characters of a stop string, `reasoning_budget_message` and `cache_salt`."
    )
    bad_words: int = option(1024, low=1, help="Entries of `bad_words`.")
    bad_word_characters: int = option(256, low=1, help="Characters or ids of a bad word.")
    biases: int = option(4096, low=1, help="Entries of `logit_bias`, and ids of `eos` and `dry_sequence_breakers`.")
    logprobs: int = option(20, low=1, help="`logprobs`, `top_logprobs` and `prompt_logprobs`: alternatives per token.")
    text_characters: int = option(1_048_576, low=1, help="Characters of a text or a chat for /tokenize.")
    template_values: int = option(4096, low=1, help="Values in `chat_template_kwargs`, nested ones included.")

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy takes a dataclass's own hash for its class's
        for name, declared in options_of(kind).items():
            declared.check(getattr(self, name))

    @classmethod
    def of(cls, limits: Mapping[str, Any]) -> Self:
        """Limits with some changed. Raises `RequestError`: an unknown name, or an invalid value."""
        check_option_names(limits, [field.name for field in dataclasses.fields(cls)], noun="limit")
        return cls(**limits)


@dataclass
class Validation:
    """The context of a validation. limits: of a body. ignore_unsupported: drop unsupported hints, and collect their
    names in `ignored`. stores: whether responses can be stored."""

    limits: Limits = field(default_factory=Limits)
    ignore_unsupported: bool = False
    ignored: list[str] = field(default_factory=list)
    stores: bool = False


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
            check_option_names(map(str, place), tuple(model.model_fields))
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


def expected(text: str, code: str = "invalid_type") -> WrapValidator:
    """One error for a value of several types. text: after "must be". code: of the error."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise FieldError(f"must be {text}; got {brief(value)}", code) from None

    return WrapValidator(check)


def _check_whole(value: Any, validate: Callable[[Any], Any]) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        place, problem = _first(error)
    inner = f".{path_of(place)}{problem.at}{problem.inner}".rstrip(".")
    raise FieldError(problem.problem, problem.code, inner=inner)


# An object whose errors blame the whole field, and name the place in it in the message.
Whole = WrapValidator(_check_whole)


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
        values = " or ".join(str(each).lower() if isinstance(each, bool) else repr(each) for each in self.allowed)
        raise FieldError(f"is not supported: remove it{values and f', or use {values}'}", "unsupported_value")

    def describe(self, schema: JsonSchema) -> JsonSchema:
        return {"enum": [*self.allowed, None], "description": "Not supported."}


# A field that never changes a response.
Label = Annotated[Any, WithJsonSchema({"description": "A label, without effect."})]
