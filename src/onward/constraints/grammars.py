"""Grammars of texts. Called with a tokenizer each returns a `Constraint`."""

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar

import llguidance

from onward.constraints.compiler import GrammarConstraint, compiled
from onward.constraints.gbnf import is_gbnf
from onward.constraints.gbnf_lexemes import lark_of_gbnf
from onward.errors import OptionError, RequestError, TokenizerError, blaming, one_line
from onward.schemas import Spacing, check_schema, has_large_numbers, json_rules, lark_string, normalized
from onward.tokenizer import Tokenizer
from onward.util.checks import as_tuple
from onward.util.text import brief
from onward.util.text_input import parse_json


class Grammar:
    """A grammar in a language that llguidance compiles.

    Call it with a tokenizer, and with the ids that end a text, for a constraint at the start of a text.
    option: the option to blame for errors.
    """

    option: ClassVar[str] = "constraint"

    def source(self) -> str:
        """The grammar in llguidance's format."""
        raise NotImplementedError

    def __call__(self, tokenizer: Tokenizer | None, stop_ids: AbstractSet[int] = frozenset()) -> GrammarConstraint:
        """Compiled grammars are cached, so a second call costs a copy.

        Raises:
            RequestError: the grammar is invalid, too large, or matches no text.
            TokenizerError: no tokenizer, or one whose tokens' bytes are not known.
        """
        if tokenizer is None:
            raise TokenizerError(
                f"{self!r} is of text, and this model has no tokenizer: give constraint= an onward.Constraint over ids"
            )
        with blaming(self.option):
            return compiled(self.source(), tokenizer, stop_ids, repr(self))


@dataclass(frozen=True)
class Regex(Grammar):
    """A regular expression for the whole text, in Rust's syntax (https://docs.rs/regex): no look-around and no
    backreferences."""

    option = "regex"
    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise OptionError("regex", f"must be a pattern as a str; got {self.pattern!r}")

    def source(self) -> str:
        return llguidance.LLMatcher.grammar_from_regex(self.pattern)


@dataclass(frozen=True)
class Lark(Grammar):
    """A context-free grammar with the rule `start`, in llguidance's variant of Lark's syntax
    (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md); or one with the rule `root ::=` in llama.cpp's
    GBNF (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md)."""

    option = "grammar"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise OptionError("grammar", f"must be a grammar in Lark's syntax or GBNF as a str; got {self.text!r}")

    def source(self) -> str:
        text = lark_of_gbnf(self.text) if is_gbnf(self.text) else self.text
        return llguidance.LLMatcher.grammar_from_lark(text)

    def __repr__(self) -> str:
        """One line, however long the grammar is."""
        text = " ".join(self.text.split())
        return f"Lark({text if len(text) <= 60 else text[:59] + '…'!r})"


@dataclass(frozen=True)
class Choice(Grammar):
    """A choice of several texts."""

    option = "choice"
    texts: tuple[str, ...]

    def __init__(self, texts: str | Iterable[str]) -> None:
        choices = as_tuple("choice", texts, str)
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise OptionError("choice", f"must be one or more non-empty texts; got {brief(texts)}")
        object.__setattr__(self, "texts", choices)

    def source(self) -> str:
        alternatives = " | ".join(map(lark_string, self.texts))
        # One terminal, which becomes an automaton: alternatives of a rule would each be a state of the parser.
        return llguidance.LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {alternatives}")


@dataclass(frozen=True)
class GrammarSource(Grammar):
    """The `source` of a grammar."""

    text: str

    def source(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"GrammarSource({brief(self.text)})"


@dataclass(frozen=True)
class AfterText(Grammar):
    """Another grammar after a beginning: rules in Lark's syntax, one of them named `beginning`."""

    beginning: str
    grammar: Grammar

    @property
    def option(self) -> str:  # type: ignore[override]
        return self.grammar.option

    def source(self) -> str:
        return followed(f"start: beginning @following\n{self.beginning}", self.grammar)

    def __repr__(self) -> str:
        return repr(self.grammar)


def followed(rules: str, grammar: Grammar) -> str:
    """The source of rules in Lark's syntax in which `@following` refers to another grammar."""
    source = grammar.source()
    # llguidance represents several grammars as JSON, and a single one in Lark's syntax as it is.
    following = json.loads(source)["grammars"] if source.startswith('{"grammars"') else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": rules}, following[0] | {"name": "following"}, *following[1:]]})


# Whitespace between two tokens of JSON is bounded: a confused model could generate it forever.
_SPACE = r"[\x20\x0A\x0D\x09]"
_FREE = Spacing.free(_SPACE, 32)
# Between the rules of large numbers one character is enough.
_SPARING = Spacing.free(_SPACE, 1)
_COMPACT = Spacing({"whitespace_flexible": False}, '","', '":"')


class JsonSchema(Grammar):
    """JSON that matches a schema, with properties in the schema's order.

    schema: a JSON Schema as a dict (or True, for any JSON), or a pydantic class, whose objects then have only the
        class's properties.
    whitespace: allow spaces and line breaks between the tokens of JSON, up to 32 in a row. Without them more of the
        text follows from the schema alone, and is drafted for free.

    Raises:
        RequestError: the schema is invalid.
    """

    option = "json_schema"

    def __init__(self, schema: Any, *, whitespace: bool = True) -> None:
        self.python_class: Any = None
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):  # without an import of pydantic
            self.python_class = schema
            schema = _closed(schema.model_json_schema())
        if not isinstance(schema, Mapping | bool):
            problem = f"must be a JSON Schema as a dict, or a pydantic class; got {schema!r}: for any JSON give {{}}"
            raise OptionError(self.option, problem)
        if schema is False:
            raise OptionError(self.option, "is False, which matches no text: for any JSON give {}")
        try:
            with blaming(self.option):
                check_schema(schema, self.option)
                json.dumps(schema, allow_nan=False)  # also the values that `normalized` drops
                self.text = json.dumps(normalized(schema, self.option), allow_nan=False)
        except RequestError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(self.option, f"is not JSON ({one_line(error)})") from error
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
        # As text: with objects llguidance takes integers of 64 bits at most, also in defaults and examples.
        defaults: Any = dict(self.spacing.guidance)
        text = "{}" if schema is True else self.text
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=defaults)
        except ValueError as error:  # such as a number in an unknown keyword that is not a double
            raise OptionError(self.option, f"cannot be read: {one_line(error)}") from error

    def rules(self, name: str) -> list[str]:
        """Rules in Lark's syntax; `name` derives this JSON."""
        with blaming(self.option):
            return json_rules(name, json.loads(self.text), self.spacing, self.option)

    @property
    def spacing(self) -> Spacing:
        if not self.whitespace:
            return _COMPACT
        return _SPARING if self.has_large_numbers else _FREE

    @property
    def has_large_numbers(self) -> bool:
        """Whether it has numbers beyond 2^53, which llguidance would round."""
        return has_large_numbers(json.loads(self.text))

    def parsed(self, text: str) -> Any:
        """The text's JSON value, or an instance of the pydantic class; a `RequestError` if it is not valid."""
        try:
            return parse_json(text) if self.python_class is None else self.python_class.model_validate_json(text)
        except ValueError as error:  # pydantic's ValidationError is one
            raise RequestError(f"the text is not a {self!r}: {one_line(error)[:300]}") from error


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A pydantic class's schema without additional properties, which instances would drop."""
    definitions = {name: _closed(one) for name, one in schema.get("$defs", {}).items()}
    closed = schema | ({"$defs": definitions} if definitions else {})
    if "properties" in schema and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed
