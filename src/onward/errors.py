"""Every error Onward raises on purpose.

A message says what was got, what was wanted and what to do. The command line prints it as one line and
exits with 2; anything that is not an `OnwardError` is a defect of ours and keeps its traceback.

    OnwardError
    ├── RequestError (ValueError)        an option, a prompt or an argument that cannot be served
    │   ├── ContextOverflowError              more positions asked for than the context or the cache holds
    │   └── NothingToDrawError                bans that leave no id
    ├── ConfigError (ValueError)         config.json: missing, unreadable or contradicting fields
    │   └── UnsupportedArchitectureError      a family that Onward does not have
    ├── CheckpointError                  weights: missing, truncated, mis-shaped, of a wrong dtype
    ├── SessionError                     a saved session: unreadable, damaged, something else or of another model
    ├── TokenizerError                   no tokenizer, an unreadable one, or one without what was asked of it
    ├── DraftError                       a drafter that failed, or proposed what no draft can be
    ├── ProgramError                     a forward that cannot become a program, or one used otherwise
    └── SourceError                      a folder or hub id that cannot be reached

    OnwardWarning (UserWarning)          legal, but probably not what was meant
"""

import functools
import sys
import warnings
from pathlib import Path


class OnwardError(Exception):
    """The root of the tree: catch this to catch them all."""


class RequestError(OnwardError, ValueError):
    """A request that cannot be served as asked: an option, a prompt or an argument."""


class ContextOverflowError(RequestError):
    """More positions are asked for than the context or the cache holds."""


class NothingToDrawError(RequestError):
    """Bans, of ids, words and repetitions, leave no id at some position."""


class ConfigError(OnwardError, ValueError):
    """A model configuration that is missing, unreadable or contradicts itself."""


class UnsupportedArchitectureError(ConfigError):
    """A checkpoint of a family that Onward does not have."""


class CheckpointError(OnwardError):
    """Weights that are missing, truncated, mis-shaped or of a dtype that cannot be read."""


class TokenizerError(OnwardError):
    """No tokenizer, an unreadable one, or one that lacks what was asked of it."""


class SessionError(OnwardError):
    """A saved session that cannot be written or read, is damaged, something else, or of another model."""


class SourceError(OnwardError):
    """A folder or hub id that does not exist or cannot be reached."""


class DraftError(OnwardError):
    """A drafter that failed, or proposed what no draft can be."""


class ProgramError(OnwardError):
    """A forward that cannot become a program, or a program used otherwise than it was compiled for."""


class OnwardWarning(UserWarning):
    """Something legal that is probably not what was meant."""


def one_line(error: BaseException) -> str:
    """What an error of another library says, as part of one of our one-line messages."""
    return " ".join(str(error).split()) or type(error).__name__


# Whose lines a warning is never about: the package's own, and functools', which stands between a cached
# property and its caller.
_NOT_THE_USERS = (str(Path(__file__).parent), functools.__file__)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """`warn`, for what is said once in a process; another message is another warning."""
    if message not in _warned:
        _warned.add(message)
        warn(message)


def warn(message: str) -> None:
    """An `OnwardWarning` that points at the user's line, however deep in the package it arises."""
    depth = 1
    while (frame := sys._getframe(depth)).f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        depth += 1
    warnings.warn(message, OnwardWarning, stacklevel=depth + 1)
