"""Grammars: what a text may be. With a tokenizer each of them makes a `Constraint`."""

import json
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import llguidance

from onward.checkpoint import Tokenizer
from onward.checks import as_tuple
from onward.constraints.compiled import compiled
from onward.constraints.matcher import GrammarConstraint
from onward.errors import RequestError, TokenizerError
from onward.schemas import lark_string


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
class After(Grammar):
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
