"""Lark grammars of texts as grammars of JSON strings: each terminal derives its texts with JSON's escapes."""

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from onward.schemas import lark_string

# In characters: reading takes up to 30 µs for each.
_MAX_LENGTH = 20_000
# Characters that JSON escapes, each with its escape.
_ESCAPES = {chr(code): json.dumps(chr(code))[1:-1] for code in (*range(0x20), 0x22, 0x5C)}
_OTHERS = r"[^\x22\x5c\x00-\x1f]"
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "u": re.UNICODE, "x": re.VERBOSE, "l": 0}
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKENS = re.compile(
    rf"""(?P<comment>(?://|\#)[^\n]*)
    | (?P<range>{_STRING}\s*\.\.\s*{_STRING})
    | (?P<string>{_STRING})(?P<string_flag>i?)
    | /(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<regex_flags>[imslux]*)
    | (?P<imports>%import\s+[^\n]*)
    | (?P<terminal>\b_*[A-Z][A-Z0-9_]*\b)
    | (?P<unsupported>%\w+|<[^>\n]*>|@\w|~\s*(?!\d)\S|&|\b(?:stop|suffix)\s*=)
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+))?|\(([\w\s,]+)\))\s*(?:(?://|\#).*)?")
# The terminals of Lark's `common`, as regular expressions.
_COMMON = {
    "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "CR": r"\r",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?",
    "SH_COMMENT": r"\#[^\n]*",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


def quoted_lark(grammar: str) -> str:
    """The grammar whose texts are those of `grammar`, as JSON strings without their quotes.

    Terminals become rules, in which an escape is a terminal of its own: a lexer never backtracks, so a terminal must
    not go on in an escape that another one could begin with.

    Raises:
        ValueError: the grammar uses what JSON's escapes cannot be worked into; the message is about that part.
    """
    if len(grammar) > _MAX_LENGTH:
        raise ValueError(f"it has {len(grammar)} characters; at most {_MAX_LENGTH} are allowed")
    return _TOKENS.sub(_quoted_token, grammar)


def _quoted_token(match: "re.Match[str]") -> str:
    part = match.group()
    if match["comment"]:
        return ""
    if match["range"]:
        first, last = (json.loads(each) for each in re.findall(_STRING, part))
        return quoted_regex(f"[{re.escape(first)}-{re.escape(last)}]")
    if match["string"]:
        try:
            text = json.loads(match["string"], strict=False)
        except ValueError:
            raise ValueError(f"the string {part} is not one of JSON") from None
        return quoted_regex(re.escape(text), match["string_flag"])
    if match["regex"]:
        return quoted_regex(match["regex"], match["regex_flags"])
    if match["imports"]:
        return "\n".join(_imported(part))
    if match["terminal"]:
        return _rule_name(part)
    raise ValueError(f"{part!r} is not supported in it")


def _rule_name(terminal: str) -> str:
    return f"terminal_{terminal.lower()}"


def _imported(part: str) -> Iterator[str]:
    """The definitions of imported terminals."""
    match = _IMPORT.fullmatch(part.rstrip())
    names = () if match is None else [match[1]] if match[1] else re.findall(r"\w+", match[3])
    for name in names:
        if name not in _COMMON:
            raise ValueError(f"common has no {name}")
        yield f"{_rule_name((match and match[2]) or name)}: {quoted_regex(_COMMON[name])}"
    if not names:
        raise ValueError(f"{part!r} imports from another grammar than common")


def quoted_regex(pattern: str, flags: str = "") -> str:
    """What derives the texts that match a regular expression, as JSON strings without quotes, in a rule of Lark.

    Raises:
        ValueError: it has an assertion, a reference, or another syntax than Python's and Rust's common one.
    """
    number = 0
    for flag in flags:
        number |= _FLAGS[flag]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parsed = sre_parser.parse(pattern, number)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise ValueError(f"the regular expression /{pattern}/ cannot be read ({error})") from None
    return f"({_sequence(parsed, parsed.state.flags, pattern)})"


def _sequence(nodes: Any, flags: int, pattern: str) -> str:
    """The derivation of nodes one after the other. Literal characters up to an escape are one string."""
    parts, literal = [], ""
    for op, value in nodes:
        if op is sre.LITERAL and chr(value) not in _ESCAPES and not flags & re.IGNORECASE:
            literal += chr(value)
            continue
        parts += [lark_string(literal)] if literal else []
        parts.append(_node(op, value, flags, pattern))
        literal = ""
    parts += [lark_string(literal)] if literal else []
    return " ".join(parts) or '""'


def _node(op: Any, value: Any, flags: int, pattern: str) -> str:
    if op in _CHARACTERS:
        return _characters(op, value, flags)
    if op is sre.SUBPATTERN:
        _, added, dropped, inner = value
        return f"({_sequence(inner, (flags | added) & ~dropped, pattern)})"
    if op is sre.BRANCH:
        return f"({' | '.join(_sequence(each, flags, pattern) for each in value[1])})"
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, inner = value
        endless, of_characters = high == sre.MAXREPEAT, len(inner) == 1 and inner[0][0] in _CHARACTERS
        if endless and low <= 1:
            each = (
                _characters(inner[0][0], inner[0][1], flags, "+")
                if of_characters
                else f"({_sequence(inner, flags, pattern)})"
            )
            return f"{each}{'*' if low == 0 else '+'}"
        return f"({_sequence(inner, flags, pattern)}){{{int(low)},{'' if endless else int(high)}}}"
    raise ValueError(f"the regular expression /{pattern}/ has {str(op).lower()}, which is not supported")


_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)


def _characters(op: Any, value: Any, flags: int, mark: str = "") -> str:
    """One character of a set, or an escape of one. mark: after the characters that are not escaped."""
    if op is sre.LITERAL and chr(value) in _ESCAPES:
        return lark_string(_ESCAPES[chr(value)])
    if op is sre.ANY:
        text = r"[\s\S]" if flags & re.DOTALL else r"[^\n]"
    elif op is sre.IN:
        text = _set(value)
    else:
        text = f"[{'^' if op is sre.NOT_LITERAL else ''}{_character(value)}]"
    insensitive = "(?i:{})" if flags & re.IGNORECASE else "{}"
    kinds = [] if op is sre.IN and _is_escaped(value) else [f"/{insensitive.format(f'[{text}&&{_OTHERS}]')}{mark}/"]
    escapes = [re.escape(escape) for each, escape in _ESCAPES.items() if _has(op, value, flags, ord(each))]
    kinds += [f"/{'|'.join(escapes)}/"] if escapes else []
    return f"({' | '.join(kinds)})"


_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def _has(op: Any, value: Any, flags: int, code: int) -> bool:
    """Whether a set has a character that JSON escapes: a control, a quote or a backslash."""
    if op is sre.ANY:
        return bool(flags & re.DOTALL) or code != 0x0A
    if op is not sre.IN:
        return bool((op is sre.NOT_LITERAL) != (code == value))
    negates = value[0][0] is sre.NEGATE
    return negates != any(_item_has(kind, item, code) for kind, item in value[negates:])


def _item_has(op: Any, value: Any, code: int) -> bool:
    if op is sre.CATEGORY:
        is_space = 0x09 <= code <= 0x0D
        return {sre.CATEGORY_SPACE: is_space, sre.CATEGORY_NOT_SPACE: not is_space}.get(
            value, value in (sre.CATEGORY_NOT_DIGIT, sre.CATEGORY_NOT_WORD)
        )
    return bool(value[0] <= code <= value[1] if op is sre.RANGE else value == code)


def _set(items: Sequence[Any]) -> str:
    parts = []
    for op, value in items:
        if op is sre.NEGATE:
            parts.append("^")
        elif op is sre.RANGE:
            parts.append(f"{_character(value[0])}-{_character(value[1])}")
        else:
            parts.append(_CATEGORIES[value] if op is sre.CATEGORY else _character(value))
    return f"[{''.join(parts)}]"


def _is_escaped(items: Sequence[Any]) -> bool:
    """Whether a set has no other characters than those that JSON escapes."""
    ranges = [value if op is sre.RANGE else (value, value) for op, value in items if op in (sre.LITERAL, sre.RANGE)]
    codes = [range(low, high + 1) for low, high in ranges if high - low <= 0x20]
    return len(codes) == len(items) and all(chr(code) in _ESCAPES for each in codes for code in each)


def _character(code: int) -> str:
    """A character in a set, in the common syntax of Python and Rust."""
    character = chr(code)
    return character if character.isalnum() or code > 0x7F else f"\\x{code:02x}"
