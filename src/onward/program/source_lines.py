"""Find the line of the user's source that a message is about."""

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onward.errors import ProgramError

_PACKAGE = Path(__file__).parent.parent
# Frames of these files are skipped. Those of the built-in families are not: they are forwards, too.
_NOT_THE_FORWARD = (
    str(Path(torch.__file__).parent),
    *(str(_PACKAGE / part) for part in ("ops", "program", "cache")),
    "<",
)


class TraceError(ProgramError):
    """A forward that cannot be traced: it is not shape-stable, or not a function of its arguments."""


def run(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the forward. `users_line` looks at the frames inside this call only."""
    return forward(*arguments, **options)


def users_line() -> str:
    """The innermost line of the running forward that belongs neither to torch nor to this package's operators."""
    frame = sys._getframe(1)
    while frame.f_code is not run.__code__ and frame.f_back is not None:
        if _of_the_forward(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def line_of(error: BaseException) -> str:
    """The innermost line of the forward in the traceback of an error."""
    innermost = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _of_the_forward(frame.f_code.co_filename):
            innermost = f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return innermost


@functools.cache
def _of_the_forward(file: str) -> bool:
    return not file.startswith(_NOT_THE_FORWARD)


@functools.cache
def _short(file: str) -> str:
    return str(Path(*Path(file).parts[-2:]))
