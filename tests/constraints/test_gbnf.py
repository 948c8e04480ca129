"""A GBNF grammar admits exactly the texts that it derives, however they are split into lexemes and tokens."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import onward
from onward.constraints import Lark
from onward.constraints.gbnf import is_gbnf
from onward.errors import RequestError
from onward.sampling.constraint import admits
from onward.testing import ByteTokenizer

STOP = 257
TOKENIZER = ByteTokenizer()
DEMO = onward.load("demo").tokenizer


def follow(constraint, ids):
    """Whether a constraint accepts all of the ids, and the text may end there."""
    for token in ids:
        if constraint.is_done or not admits(constraint.mask(), token):
            return False
        constraint.accept(token)
    return constraint.is_done or admits(constraint.mask(), STOP)


def accepts(grammar, text):
    """With a token for each byte, and with the demo model's tokens."""
    one = follow(Lark(grammar)(TOKENIZER, frozenset({STOP})), list(text.encode()))
    ids = DEMO.encode(text, add_special_tokens=False)
    assert DEMO.decode(ids) == text
    constraint = Lark(grammar)(DEMO, frozenset({STOP}))
    assert follow(constraint, ids) == one
    return one


# ── random grammars ──────────────────────────────────────────────────────────────────────────────────────────────

# Expressions of the tests: a text, a set of characters, or (kind, …) with parts.
CHARACTERS = "ab\n"
COUNTS = {(0, None): "*", (1, None): "+", (0, 1): "?", (2, 2): "{2}", (1, 2): "{1, 2}", (2, None): "{2,}"}
LEAVES = st.one_of(
    st.sampled_from(["", "a", "b", "ab", "ba", "aab", "a\n"]),
    st.frozensets(st.sampled_from(CHARACTERS), min_size=1),
    st.sampled_from(["root", "x", "y-z"]).map(lambda name: ("rule", name)),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("sequence"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("choice"), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.just("repeat"), inner, st.sampled_from(list(COUNTS))),
    ),
    max_leaves=6,
)
GRAMMARS = st.fixed_dictionaries(dict.fromkeys(("root", "x", "y-z"), EXPRESSIONS))


def escaped(text):
    return "".join({"\n": "\\n", '"': '\\"', "\\": "\\\\"}.get(each, each) for each in text)


def gbnf_of(expr):
    if isinstance(expr, str):
        return f'"{escaped(expr)}"'
    if isinstance(expr, frozenset):
        others = set(CHARACTERS) - expr
        return f"[{escaped(sorted(expr))}]" if others else "."
    kind, parts = expr[:2]
    if kind == "rule":
        return parts
    if kind == "repeat":
        return f"({gbnf_of(parts)}){COUNTS[expr[2]]}"
    return f"({(' | ' if kind == 'choice' else ' ').join(map(gbnf_of, parts))})"


class Reference:
    """Where the texts of each expression may end: the smallest solution of the equations, so any recursion is fine."""

    def __init__(self, rules, text):
        self.rules, self.text = rules, text
        self.ends = {(name, at): frozenset() for name in rules for at in range(len(text) + 1)}
        while True:
            ends = {(name, at): frozenset(self.of(rules[name], at)) for name, at in self.ends}
            if ends == self.ends:
                break
            self.ends = ends

    def of(self, expr, at):
        if isinstance(expr, str):
            return {at + len(expr)} if self.text.startswith(expr, at) else set()
        if isinstance(expr, frozenset):
            return {at + 1} if at < len(self.text) and self.text[at] in expr else set()
        kind, parts = expr[:2]
        if kind == "rule":
            return self.ends[parts, at]
        if kind == "choice":
            return {end for part in parts for end in self.of(part, at)}
        if kind == "sequence":
            starts = {at}
            for part in parts:
                starts = {end for start in starts for end in self.of(part, start)}
            return starts
        low, high = expr[2]
        reached, starts = ({at} if low == 0 else set()), {at}
        for count in range(1, (low + len(self.text) + 1 if high is None else high) + 1):
            starts = {end for start in starts for end in self.of(parts, start)}
            reached |= starts if count >= low else set()
        return reached

    @property
    def matches(self):
        return len(self.text) in self.ends["root", 0]


TEXTS = ["".join(each) for length in range(6) for each in itertools.product(CHARACTERS, repeat=length)]


@settings(max_examples=200, deadline=None)
@given(GRAMMARS)
def test_a_grammar_admits_its_own_derivations(rules):
    grammar = "\n".join(f"{name} ::= {gbnf_of(expr)}" for name, expr in rules.items())
    expected = {text for text in TEXTS if Reference(rules, text).matches}
    assume(expected)
    start = Lark(grammar)(TOKENIZER, frozenset({STOP}))
    found, walks = set(), [("", start)]
    while walks:
        text, constraint = walks.pop()
        mask = None if constraint.is_done else constraint.mask()
        if mask is None or admits(mask, STOP):
            found.add(text)
        for character in CHARACTERS if mask is not None and len(text) < 5 else "":
            if admits(mask, ord(character)):
                onwards = constraint.fork()
                onwards.accept(ord(character))
                walks.append((text + character, onwards))
    assert found == expected


# ── grammars that people use ─────────────────────────────────────────────────────────────────────────────────────

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
LIST = r"""
root ::= item+

# Excludes various line break characters
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
CHESS = r"""
root     ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move     ::= (pawn | nonpawn | castle) [+#]?
nonpawn  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn     ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle   ::= "O-O" "-O"?
"""
JAPANESE = "root ::= jp-char+ ([ \\t\\n] jp-char+)*\njp-char ::= [ぁ-ゟ] | [ァ-ヿ] | [\\u4E00-\\U00009FFF]"
LINES = 'root ::= "a" # one\n  | "b"\n\t| (\n  "c"\n | "d"\n)\n'


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (
            JSON,
            ['{"a": [1, -2.5e3, "x\\u00e9\\n"], "b": {"c": null}}', "{}", '{"a":\n\t\ttrue}', '{"": [[], {}]}'],
            ['{"a": 01}', '{"a"}', "[1]", '{"a": "\x7f"}', '{"a":  1}', '{"a": 1,}'],
        ),
        (ARITHMETIC, ["a +(b*12)=3\n\n", "x1=2\n", "1 = 1\ny=(2)\n"], ["a=1", "a + b=1\n", "1a=2\n", "=1\n"]),
        (LIST, ["- a fox\n- an owl: éß\n"], ["- a\n\n", "-a\n", "- \n", "- a\u2028\n"]),
        (
            CHESS,
            ["1. e4 e5\n2. Nf3 O-O-O+\n", "1. exd5 e8=Q#\n12. Qa1xb2 O-O\n"],
            ["1. e4 e5\n", "2. e4 e5\n1. e4 e5\n"],
        ),
        (JAPANESE, ["日本 ごはん", "カ"], ["日本  ご", "a", ""]),
        (LINES, ["a", "b", "c", "d"], ["", "ab"]),
        ('root ::= "ab" "d" | [a-z] "bc"', ["abd", "abc"], ["ab", "abcd"]),
        (
            'root ::= [^"\\]\\\\] "\\x41\\"\\u00e9" [\\]a-]',
            ['xAa"é]'.replace("a", "", 1), '-A"é-'],
            ['"A"é]', '\\A"éa'],
        ),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a"**', ["", "aaa"], ["b"]),
        ("root ::= .", ["\n", "é", "\U0001f600"], ["", "ab"]),
    ],
)
def test_a_llama_cpp_grammar(grammar, texts, others):
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


def test_the_root_rule_defines_the_language():
    assert is_gbnf('x ::= "a"\n  root::= x')
    assert not is_gbnf('start: "root ::= x"')
    assert accepts('start: "a"', "a")


@pytest.mark.parametrize(
    ("grammar", "line", "column", "problem"),
    [
        ('root ::= "a', 1, 12, "expected '\"'"),
        ('root ::= "a\n"', 1, 12, "expected '\"'"),
        ("root ::= [a", 1, 12, "expected ']'"),
        ('root ::= ("a"', 1, 14, "expected ')'"),
        ('root ::= "a")', 1, 13, "expected an expression or the end of the line"),
        ("root ::= x\ny ::= x", 1, 10, "no rule 'x'"),
        ('root ::= "a"\nroot ::= "b"', 2, 1, "the rule 'root' is defined twice"),
        ('root ::= "a"\nx = "b"', 2, 3, "expected '::='"),
        ('root ::= "a"{2,1}', 1, 13, "{2,1} has its larger number first"),
        ('root ::= "a"{x}', 1, 14, "expected a number"),
        ("root ::= [z-a]", 1, 10, "the range 'z' to 'a' is empty"),
        ("root ::= []", 1, 10, "the class has no characters"),
        ('root ::= "\\q"', 1, 11, "unknown escape \\q"),
        ('root ::= "\\xg1"', 1, 11, "\\xg1 is not a character"),
        ('root ::= "\\ud800"', 1, 11, "\\ud800 is not a character"),
        ("root ::= <[12]>", 1, 10, "tokens in a grammar are not supported: write their text"),
        ("root ::= *", 1, 10, "expected an expression or the end of the line"),
        ("root ::= " + "(" * 101, 1, 110, "groups are nested more than 100 deep"),
    ],
)
def test_errors_name_their_position(grammar, line, column, problem):
    with pytest.raises(RequestError) as caught:
        Lark(grammar)(TOKENIZER, frozenset({STOP}))
    assert str(caught.value) == f"grammar is not valid GBNF at line {line}, column {column}: {problem}"


def test_large_grammars_are_translated_fast_or_refused():
    """A search for lexemes has limits, whatever the grammar is."""
    words = " | ".join(f'"{number:04} word"' for number in range(3000))
    nested = "\n".join(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(40)) + '\nr40 ::= "a" | "b"'
    for grammar in (f'root ::= ({words}) root | "."', f"root ::= r0\n{nested}"):
        try:
            follow(Lark(grammar)(TOKENIZER, frozenset({STOP})), b"0007 word.")
        except RequestError as error:
            assert "grammar" in str(error)  # noqa: PT017
