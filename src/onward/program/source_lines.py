"""Which line of the user's source a message is about."""

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onward.errors import ProgramError

_PACKAGE = Path(__file__).parent.parent
# Frames that are never the line a message is about. The built-in families' lines are.
_NOT_THE_FORWARD = (
    str(Path(torch.__file__).parent),
    *(str(_PACKAGE / part) for part in ("ops", "program", "cache")),
    "<",
)


class TraceError(ProgramError):
    """A forward that cannot be traced: it is not shape-stable, or not a function of its arguments."""


def run(forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call the forward: lines are looked for from here inwards."""
    return forward(*given, **options)


def users_line() -> str:
    """The innermost line of the traced forward that is neither torch's nor this package's operators'."""
    frame = sys._getframe(1)
    while frame.f_code is not run.__code__ and frame.f_back is not None:
        if _of_the_forward(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def line_of(error: BaseException) -> str:
    """The innermost line of the forward in the traceback of an error."""
    found = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _of_the_forward(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return found


@functools.cache
def _of_the_forward(file: str) -> bool:
    return not file.startswith(_NOT_THE_FORWARD)


@functools.cache
def _short(file: str) -> str:
    return str(Path(*Path(file).parts[-2:]))
