"""Text and JSON input: bodies, lines of batches, arguments, and files, all parsed by the same rules.

    rule                       requests (`parse_request_json`)            model files (`parse_json`)
    encoding                   UTF-8; a byte order mark at the start is dropped
    duplicate names            the last one counts, as in Python's json
    nesting                    at most `MAX_DEPTH` objects and lists
    digits of an integer       at most `MAX_DIGITS`, all exact
    values, names              at most `MAX_VALUES`, `MAX_NAMES`              any number
    NaN, Infinity, 1e999       rejected                                   numbers, as in transformers
    lone surrogates            rejected                                   accepted; rejected where the text is used

`check_value` applies the rules of requests to Python values (options, messages, tools, schemas), except that it allows
non-finite numbers, which some options take.
"""

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from onward.errors import RequestError

# Below the recursion limits of all later readers: Jinja's `tojson` and `pprint`, `json.dumps`, and serde_json in
# llguidance, which takes 127.
MAX_DEPTH = 100
# The default of `sys.get_int_max_str_digits`.
MAX_DIGITS = 4300
# Values and names of objects in a request: the parser blocks all other threads while it makes them.
MAX_VALUES, MAX_NAMES = 2**18, 2**15
# Shorter texts can't have as many as would block for long.
_SHORT = 2**16
# The maximum bytes of a line of JSON, the default limit of HTTP bodies (`onward.server.Settings`).
LONGEST_LINE = 8 * 2**20
_LARGEST = 10**MAX_DIGITS - 1
_SMALLEST = -_LARGEST

_SURROGATE = re.compile("[\ud800-\udfff]")
# Escapes in JSON that may be lone surrogates; after an escaped backslash a regex cannot tell.
_MAYBE_LONE = re.compile(
    r"\\(?:\\u[dD][89a-fA-F]|u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F]))", re.DOTALL
)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# Byte order marks, longest first: UTF-32's begins with UTF-16's.
_OTHER_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class _Path(NamedTuple):
    """The path of a value: a name or an index in the value at `outer`."""

    outer: "_Path | None"
    key: Any


class TextError(RequestError):
    """Text that is not UTF-8 or not JSON, or a value that a request must not contain.

    at: the path of the value, such as "messages[0].content"; None for the text as a whole. option: its first name.
    """

    def __init__(self, message: str, at: str | None = None) -> None:
        super().__init__(message, re.split(r"[.\[…]", at, maxsplit=1)[0] or None if at else None)
        self.at = at

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.at), {"option": self.option}


def decode_text(content: bytes) -> str:
    """Decode UTF-8, without a byte order mark. Raises `TextError` for other bytes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        for mark, name in _OTHER_ENCODINGS.items():
            if content.startswith(mark):
                raise TextError(f"it is {name}, and must be UTF-8") from error
        at = error.start + content.startswith(BOM_UTF8) * len(BOM_UTF8)
        raise TextError(f"it is not UTF-8: byte {at} (0x{content[at]:02x}) is out of place") from error


def read_text_file(file: Path) -> str:
    """The text of a file, with "\\n" for every line break. Raises `OSError`, and `TextError` unless it is UTF-8."""
    return decode_text(file.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def read_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, without a byte order mark. A line of more than `LONGEST_LINE` bytes, including its
    line break, is truncated to one byte more."""
    text = stream.readline(LONGEST_LINE + 1).removeprefix(BOM_UTF8)
    while text:
        yield text
        while text and not text.endswith(b"\n"):
            text = stream.readline(LONGEST_LINE + 1)
        text = stream.readline(LONGEST_LINE + 1)


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Parse JSON written by another library or a model. Raises `TextError` for other text, deep nesting, and too many
    digits. strict: reject control characters in strings."""
    value = _loaded(_as_text(text), strict)
    if _is_too_deep(value):
        raise _too_deep()
    return value


def read_json_file(file: Path) -> Any:
    """Parse the JSON of a file from another library. Raises `OSError`, and `TextError` like `parse_json`."""
    return parse_json(file.read_bytes())


def parse_request_json(text: str | bytes) -> Any:
    """Parse JSON of a request: a body, a line of a batch, a schema. Raises `TextError` like `parse_json`, and for lone
    surrogates, non-finite numbers, and too many values."""
    text = _as_text(text)
    if len(text) > _SHORT:
        _check_count(text)
    suspects: list[float] = []
    value = _loaded(text, strict=True, suspects=suspects)
    # `check_value` takes several times as long as parsing, so it only locates a probable fault.
    if suspects or _MAYBE_LONE.search(text) or _surrogate_in(text) or _is_too_deep(value):
        check_value(value, finite=True)
    return value


def check_value(value: Any, name: str = "", *, finite: bool = False) -> None:
    """Raise `TextError` for a text with a lone surrogate, a number of too many digits, or nesting that is too deep.

    Checks the items of mappings, lists and tuples too, without recursion; values of other types pass.

    name: of the value, for messages. finite: reject NaN and infinities.
    """
    if isinstance(value, str | int | float) or not isinstance(value, Mapping | list | tuple):
        _check_scalar(value, _Path(None, name), finite)
        return
    level: list[tuple[Any, _Path | None]] = [(value, _Path(None, name) if name else None)]
    for _ in range(MAX_DEPTH):
        inner: dict[int, tuple[Any, _Path]] = {}  # by identity: a shared value is checked once
        for container, path in level:
            is_mapping = isinstance(container, Mapping)
            for key, item in container.items() if is_mapping else enumerate(container):
                kind = type(item)
                if (kind is str and item.isascii()) or (kind is int and _SMALLEST <= item <= _LARGEST) or item is None:
                    pass
                elif isinstance(item, Mapping | list | tuple):
                    inner[id(item)] = item, _Path(path, key)
                else:
                    _check_scalar(item, _Path(path, key), finite)
                if is_mapping and isinstance(key, str) and (found := _surrogate_in(key)):
                    raise _surrogate(found, path, "has a name that contains")
        if not inner:
            return
        level = list(inner.values())
    raise _too_deep(_outermost(level[0][1]))


def _as_text(text: str | bytes) -> str:
    return decode_text(text) if isinstance(text, bytes) else text.removeprefix("\ufeff")


def _check_count(text: str) -> None:
    """Raise `TextError` for more values or names than a request may have."""
    if _marks(text, 0, len(text)) <= MAX_VALUES and text.count(":") <= MAX_NAMES:
        return  # even if none of them is in a string
    text = text.replace("\\\\", "").replace('\\"', "")  # then each quote begins or ends a string
    values = names = strings = at = 0
    while at >= 0:
        quote = text.find('"', at)
        end = len(text) if quote < 0 else quote
        values, names, strings = values + _marks(text, at, end), names + text.count(":", at, end), strings + 1
        if values > MAX_VALUES or strings > MAX_VALUES + MAX_NAMES:
            raise TextError(f"it has more than {MAX_VALUES:,} values: send fewer at once")
        if names > MAX_NAMES:
            raise TextError(f"its objects have more than {MAX_NAMES:,} names: send fewer at once")
        closing = -1 if quote < 0 else text.find('"', quote + 1)
        at = closing + 1 if closing >= 0 else -1


def _marks(text: str, start: int, end: int) -> int:
    """How many commas and opening brackets there are: at least as many as values."""
    return text.count(",", start, end) + text.count("[", start, end) + text.count("{", start, end)


def _whole(digits: str) -> int:
    return int(digits)


def _loaded(text: str, strict: bool, suspects: list[float] | None = None) -> Any:
    """Parse JSON. suspects: collects non-finite numbers."""

    def number(digits: str) -> float:
        value = float(digits)
        if suspects is not None and not math.isfinite(value):
            suspects.append(value)
        return value

    try:
        # A function of Python for each integer lets other threads run in between: some take 0.1 ms.
        whole = _whole if len(text) > _SHORT else None
        return json.loads(text, strict=strict, parse_float=number, parse_constant=number, parse_int=whole)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise TextError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError:  # Python's own limit of digits
        raise TextError(f"a number has more than {MAX_DIGITS:,} digits") from None


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container if type(container) is list else ()
            inner += [item for item in items if type(item) is dict or type(item) is list]
        if not inner:
            return False
        level = inner
    return True


def _check_scalar(value: Any, path: _Path, finite: bool) -> None:
    if isinstance(value, str):
        if found := _surrogate_in(value):
            raise _surrogate(found, path, "contains")
    elif isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            at = _text_of(path)
            raise TextError(f"{at or 'it'} is a number of more than {MAX_DIGITS:,} digits", at)
    elif finite and isinstance(value, float) and not math.isfinite(value):
        at = _text_of(path)
        shown = "NaN" if math.isnan(value) else "-Infinity" if value < 0 else "Infinity"
        raise TextError(f"{at or 'it'} is {shown}: a number must be within the range of a float", at)


def _surrogate_in(text: str) -> re.Match[str] | None:
    return None if text.isascii() else _SURROGATE.search(text)


def _surrogate(found: re.Match[str], path: _Path | None, verb: str) -> TextError:
    at = _text_of(path)
    what = f"a lone surrogate (U+{ord(found.group()):04X}) at position {found.start()}"
    message = f"{at or 'it'} {verb} {what}, which is not valid Unicode: was it read with the right encoding?"
    return TextError(message, at)


def _too_deep(at: str | None = None) -> TextError:
    return TextError(f"{at or 'it'} is nested too deep: at most {MAX_DEPTH} objects and lists within each other", at)


def _outermost(path: _Path | None) -> str | None:
    """The name of the outermost value. The whole path would be as long as the nesting is deep."""
    while path is not None and path.outer is not None:
        path = path.outer
    return _text_of(path)


def _text_of(path: _Path | None) -> str | None:
    """A path such as "messages[0].content"; None for a value without a name."""
    parts: list[str] = []
    while path is not None:
        key, path = path.key, path.outer
        if isinstance(key, str) and (not key or _PLAIN_NAME.fullmatch(key)):
            parts.append(f".{key}" if key else "")
        else:
            parts.append(f"[{key}]" if isinstance(key, int) else f"[{key!a}]")
    text = "".join(reversed(parts)).removeprefix(".")
    return f"{text[:200]}…" if len(text) > 200 else text or None
