"""Grammars: what a text may be. With a tokenizer each of them makes a `Constraint`."""

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import llguidance

from onward.constraints.compiler import GrammarConstraint, compiled
from onward.errors import RequestError, TokenizerError, one_line
from onward.schemas import Spacing, check_schema, has_large_numbers, json_rules, lark_string, normalized
from onward.tokenizer import Tokenizer
from onward.util.checks import as_tuple
from onward.util.text_input import parse_json


class Grammar:
    """What a text may be, in a language that llguidance compiles.

    Call it with a tokenizer, and with the ids that end a text, for a constraint that stands at the beginning of a text.
    """

    def source(self) -> str:
        """The grammar as llguidance takes it."""
        raise NotImplementedError

    def __call__(self, tokenizer: Tokenizer | None, stop_ids: AbstractSet[int] = frozenset()) -> GrammarConstraint:
        """Compiled grammars are kept, so a second call costs a copy.

        Raises:
            RequestError: the grammar cannot be read, is too large, or no text meets it.
            TokenizerError: no tokenizer, or one whose tokens' bytes are not known.
        """
        if tokenizer is None:
            raise TokenizerError(
                f"{self!r} is of text, and this model has no tokenizer: give constraint= an onward.Constraint over ids"
            )
        return compiled(self.source(), tokenizer, stop_ids, repr(self))


@dataclass(frozen=True)
class Regex(Grammar):
    """The whole text matches a regular expression in Rust's syntax (https://docs.rs/regex): no look-around and no
    backreferences."""

    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise RequestError(f"regex must be a pattern as a str; got {self.pattern!r}")

    def source(self) -> str:
        return llguidance.LLMatcher.grammar_from_regex(self.pattern)


@dataclass(frozen=True)
class Lark(Grammar):
    """The text is what `start` of a context-free grammar derives, in Lark's syntax as llguidance has it
    (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise RequestError(f"grammar must be a grammar in Lark's syntax as a str; got {self.text!r}")

    def source(self) -> str:
        return llguidance.LLMatcher.grammar_from_lark(self.text)

    def __repr__(self) -> str:
        """One line, however long the grammar is."""
        text = " ".join(self.text.split())
        return f"Lark({text if len(text) <= 60 else text[:59] + '…'!r})"


@dataclass(frozen=True)
class Choice(Grammar):
    """The text is one of several."""

    texts: tuple[str, ...]

    def __init__(self, texts: str | Iterable[str]) -> None:
        given = as_tuple("choice", texts, str)
        if not given or not all(isinstance(text, str) and text for text in given):
            raise RequestError(f"choice must be one or more non-empty texts; got {texts!r}")
        object.__setattr__(self, "texts", given)

    def source(self) -> str:
        alternatives = " | ".join(map(lark_string, self.texts))
        # One terminal, which becomes an automaton; alternatives of a rule would each be a state of the parser.
        return llguidance.LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {alternatives}")


@dataclass(frozen=True)
class AfterText(Grammar):
    """The text is a beginning, and then what another grammar says.

    beginning: rules in Lark's syntax, of which `beginning` is one. grammar: of what follows.
    """

    beginning: str
    grammar: Grammar

    def source(self) -> str:
        return followed(f"start: beginning @following\n{self.beginning}", self.grammar)

    def __repr__(self) -> str:
        return repr(self.grammar)


def followed(rules: str, grammar: Grammar) -> str:
    """The source of rules in Lark's syntax in which `@following` stands for another grammar."""
    source = grammar.source()
    # llguidance has several grammars as JSON, and one in Lark's syntax as it is.
    following = json.loads(source)["grammars"] if source.startswith('{"grammars"') else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": rules}, following[0] | {"name": "following"}, *following[1:]]})


# Spaces between two tokens of JSON end: a model that has lost its way would write them for ever.
_SPACE = r"[\x20\x0A\x0D\x09]"
_FREE = Spacing.free(_SPACE, 32)
# Between the rules of large numbers one is enough: there the model has no need to lay anything out.
_SPARING = Spacing.free(_SPACE, 1)
_COMPACT = Spacing({"whitespace_flexible": False}, '","', '":"')


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
        check_schema(schema, "json_schema")
        try:
            json.dumps(schema, allow_nan=False)  # the values that are left out afterwards, too
            self.text = json.dumps(normalized(schema, "json_schema"), allow_nan=False)
        except RequestError:
            raise
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
        schema = json.loads(self.text)
        if self.has_large_numbers:
            return llguidance.LLMatcher.grammar_from_lark("\n".join(self.rules("start")))
        # As text: of objects it takes integers of 64 bits at most, in defaults and examples, too.
        defaults: Any = dict(self.spacing.guidance)
        text = "{}" if schema is True else self.text
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=defaults)
        except ValueError as error:  # a number beside unknown keywords, say, that no double holds
            raise RequestError(f"json_schema cannot be read: {one_line(error)}") from error

    def rules(self, name: str) -> list[str]:
        """Rules in Lark's syntax; what `name` derives is such JSON."""
        return json_rules(name, json.loads(self.text), self.spacing, "json_schema")

    @property
    def spacing(self) -> Spacing:
        """What may stand between the tokens of JSON."""
        if not self.whitespace:
            return _COMPACT
        return _SPARING if self.has_large_numbers else _FREE

    @property
    def has_large_numbers(self) -> bool:
        """Whether it has numbers beyond 2^53, of which rules are made here."""
        return has_large_numbers(json.loads(self.text))

    def parsed(self, text: str) -> Any:
        """What a text stands for: a value of JSON, or an instance of the pydantic class.

        Raises:
            RequestError: it is no JSON, or the class's own checks refuse it.
        """
        try:
            return parse_json(text) if self.python_class is None else self.python_class.model_validate_json(text)
        except ValueError as error:  # pydantic's ValidationError is one
            raise RequestError(f"the text is no {self!r}: {one_line(error)[:300]}") from error


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A pydantic class's schema in which its objects have no further properties, which instances would drop."""
    definitions = {name: _closed(one) for name, one in schema.get("$defs", {}).items()}
    closed = schema | ({"$defs": definitions} if definitions else {})
    if "properties" in schema and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed
