"""Where a prompt comes from: the argument, a file or standard input."""

import os
import re
import sys
from pathlib import Path

from onward.cli.terminal import is_terminal
from onward.errors import RequestError
from onward.text_input import TextError, decode_text


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt as text.

    The newline that editors and `echo` put at the very end of a file or of standard input is dropped, so that the
    same words give the same prompt wherever they come from.

    Raises:
        RequestError: none or two are given, or what is given cannot be read as UTF-8.
    """
    from_input = "-" in (argument, str(file))
    if argument is not None and file is not None:
        raise RequestError("the prompt is given twice, as an argument and with --file: give one")
    if argument is not None and not from_input:
        return argument
    if file is not None and not from_input:
        return _without_last_newline(_decoded(_read(file, "prompt file"), f"the prompt in {file}"))
    if not from_input and (sys.stdin is None or is_terminal(sys.stdin)):
        raise RequestError("no prompt: give one as an argument, with --file FILE, or on standard input")
    return _without_last_newline(_decoded(standard_input(), "the prompt in standard input"))


def read_text(file: Path) -> str:
    """The content of a file that a flag names; '-' is standard input.

    Raises:
        RequestError: it cannot be read as UTF-8.
    """
    if str(file) == "-":
        return _decoded(standard_input(), "standard input")
    return _decoded(_read(file, "file"), repr(str(file)))


def parse_ids(text: str) -> list[int]:
    """Token ids with spaces, commas or the brackets of a list around them."""
    words = re.sub(r"[\[\],]", " ", text).split()
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not re.fullmatch(r"[+-]?\d+", word))
        raise RequestError(f"with --ids the prompt is token ids such as '1 2 3'; got {wrong!r}") from None


def standard_input() -> bytes:
    """All of it.

    Raises:
        RequestError: it is closed.
    """
    if sys.stdin is None:
        raise RequestError("standard input is closed, and the prompt was to come from there")
    return sys.stdin.buffer.read()


def expanded(file: Path) -> Path:
    """With ~ as the shell would have it; where that user is unknown, the name as it stands."""
    return Path(os.path.expanduser(file))


def expanded_source(source: str) -> str:
    """A model's source with ~ as the shell would have it, for `--model=~/x`, which shells leave alone."""
    return os.path.expanduser(source) if source.startswith("~") else source


def _read(file: Path, what: str) -> bytes:
    try:
        return expanded(file).read_bytes()
    except OSError as error:
        raise RequestError(f"the {what} {str(file)!r} cannot be read: {error.strerror or error}") from error


def _decoded(content: bytes, where: str) -> str:
    try:
        return decode_text(content)
    except TextError as error:
        raise RequestError(f"{where} is not UTF-8 text: {error}") from error


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
