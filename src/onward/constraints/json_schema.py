"""JSON Schema: texts that are JSON of a given form, and the values that they stand for."""

import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import llguidance

from onward.constraints.grammars import Grammar
from onward.errors import RequestError, one_line

# Spaces between two tokens of JSON end: a model that has lost its way would write them for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


@runtime_checkable
class PydanticClass(Protocol):
    """A class of pydantic's models. (pydantic itself is not needed, and not imported.)"""

    def model_json_schema(self) -> dict[str, Any]: ...

    def model_validate_json(self, json_data: str) -> Any: ...


class JsonSchema(Grammar):
    """The text is JSON that a schema validates. Properties come in the order in which the schema has them.

    schema: a JSON Schema as a dict (or True, which is any JSON), or a pydantic class, whose objects then have no
        properties but the class's own.
    whitespace: allow spaces and line breaks between the tokens of JSON, up to 32 in a row. Without them more of the
        text follows from the schema alone, and is drafted for free.

    Raises:
        RequestError: what is no schema.
    """

    def __init__(self, schema: Any, *, whitespace: bool = True) -> None:
        self.python_class: Any = None
        if isinstance(schema, type) and isinstance(schema, PydanticClass):
            self.python_class = schema
            schema = _closed(schema.model_json_schema())
        if not isinstance(schema, Mapping | bool):
            raise RequestError(
                f"json_schema must be a JSON Schema as a dict, or a pydantic class; got {schema!r}: for any JSON give "
                "{}"
            )
        if schema is False:
            raise RequestError("json_schema is False, which no text meets: for any JSON give {}")
        try:
            self.text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON ({one_line(error)})") from error
        self.whitespace = whitespace

    def __repr__(self) -> str:
        if self.python_class is not None:
            return f"JsonSchema({self.python_class.__name__})"
        return f"JsonSchema({self.text if len(self.text) <= 60 else self.text[:59] + '…'})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonSchema) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, bool, Any]:
        return self.text, self.whitespace, self.python_class

    def source(self) -> str:
        spaces: Any = {"whitespace_pattern": _WHITESPACE} if self.whitespace else {"whitespace_flexible": False}
        schema = json.loads(self.text)
        return llguidance.LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=spaces)

    def parsed(self, text: str) -> Any:
        """What a text stands for: a value of JSON, or an instance of the pydantic class.

        Raises:
            RequestError: it is no JSON, or the class's own checks refuse it.
        """
        try:
            return json.loads(text) if self.python_class is None else self.python_class.model_validate_json(text)
        except ValueError as error:  # pydantic's ValidationError is one
            raise RequestError(f"the text is no {self!r}: {one_line(error)[:300]}") from error


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A pydantic class's schema in which its objects have no further properties, which instances would drop."""
    definitions = {name: _closed(one) for name, one in schema.get("$defs", {}).items()}
    closed = schema | ({"$defs": definitions} if definitions else {})
    if "properties" in schema and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed
