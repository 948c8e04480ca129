"""All errors that Onward raises on purpose.

A message says what Onward got, what it expected and what to do. The command line prints it as one line and exits with
2. Any other exception is a bug in Onward and keeps its traceback. Built-in bases are in parentheses.

    OnwardError                              raised itself if logits are NaN or infinite
    ├── RequestError (ValueError)            an option, a prompt or an argument is invalid or not supported
    │   ├── OptionError                      an option has an invalid value
    │   ├── ContextOverflowError             a request needs more positions than the context or the cache holds
    │   ├── NothingToDrawError               bans or a constraint leave no id to choose
    │   ├── TextError                        text is not UTF-8, JSON or Unicode, or nested too deep
    │   ├── UnsupportedModuleError           a module of transformers works only with its own caches (onward.models)
    │   └── BodyError                        a request body has an unsupported or invalid field (onward.protocols)
    │       ├── ResponseStoreError           the file of stored responses cannot be read or written (onward.server)
    │       └── MemoryFullError              there is no memory for a request (onward.server)
    ├── ConfigError (ValueError)             config.json is missing, unreadable or contradicts itself
    │   └── UnsupportedArchitectureError     the checkpoint's family is not supported
    ├── CheckpointError                      weights are missing, truncated, or of a wrong shape or dtype
    ├── SessionError                         a session cannot be saved, or a file is not a session of this model
    ├── TokenizerError                       the tokenizer or its template is missing, unreadable or lacks a part
    ├── DraftError                           a drafter failed, or proposed invalid ids
    ├── EngineError                          an engine is closed, or its thread has failed
    │   └── EngineBusyError                  an engine's queue is full
    ├── RankError                            another process that holds a part of the model has ended or failed
    ├── ProgramError                         a forward cannot be compiled, or a program does not fit the call
    │   ├── TraceError                       a forward cannot be traced (onward.program)
    │   └── MissingKernelsError              a forward uses operators that have no kernel (onward.program)
    ├── NativeUnavailableError (ValueError)  the native library, or the requested one, is missing (onward.native)
    ├── NativeError                          a kernel rejected its arguments or is out of memory (onward.native)
    └── SourceError                          a folder or hub id does not exist or is not reachable

    OnwardWarning (UserWarning)              something is legal, but probably not intended
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class OnwardError(Exception):
    """The base class of all errors."""


class RequestError(OnwardError, ValueError):
    """An option, a prompt or an argument is invalid or not supported. option: its name, if one is to blame."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.option)


class OptionError(RequestError):
    """An option has an invalid value.

    option: its name. problem: the rest of the message, which callers with another name for it put after theirs.
    """

    option: str

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option} {problem}", option)
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.option, self.problem)


@contextlib.contextmanager
def blaming(option: str) -> Iterator[None]:
    """Set the option of each `RequestError` that passes and has none."""
    try:
        yield
    except RequestError as error:
        error.option = error.option or option
        raise


class ContextOverflowError(RequestError):
    """A request needs more positions than the context or the cache holds."""


class NothingToDrawError(RequestError):
    """Bans of ids, words and repetitions, or a constraint, leave no id to choose at some position."""


class ConfigError(OnwardError, ValueError):
    """A model's configuration is missing, unreadable or contradicts itself."""


class UnsupportedArchitectureError(ConfigError):
    """The checkpoint's family is not supported."""


class CheckpointError(OnwardError):
    """Weights are missing, truncated, or of a wrong shape or an unreadable dtype."""


class TokenizerError(OnwardError):
    """The tokenizer or its chat template is missing, unreadable or lacks a part."""


class SessionError(OnwardError):
    """A session cannot be saved; or a file is unreadable, damaged, or not a session of this model."""


class SourceError(OnwardError):
    """A folder or hub id does not exist or is not reachable."""


class DraftError(OnwardError):
    """A drafter failed, or proposed invalid ids or probabilities."""


class EngineError(OnwardError):
    """An engine rejects requests: it is closed, its thread has failed, or this is a forked child."""


class EngineBusyError(EngineError):
    """An engine's queue is full. retry_after: the estimated number of seconds until there is room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type["EngineBusyError"], tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class RankError(OnwardError):
    """Another process with a part of the model has ended, failed or is not reachable."""


class ProgramError(OnwardError):
    """A forward cannot be compiled, or a program does not fit the call: it was compiled for other inputs."""


class OnwardWarning(UserWarning):
    """Something legal that is probably not intended."""


def one_line(error: BaseException) -> str:
    """The message of another library's error on one line, for messages of ours."""
    return " ".join(str(error).split()) or type(error).__name__


# Files that a warning never points at: the package's own, functools.py, which calls cached properties, and torch's
# decorators such as `inference_mode`. (Importing torch for its path would cost every error a second.)
_INTERNAL_FILES = (str(Path(__file__).parent), functools.__file__)
_DECORATORS = str(Path("torch", "utils", "_contextlib.py"))
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """`warn`, once per process for each message."""
    if message not in _warned:
        _warned.add(message)
        warn(message)


def warn(message: str) -> None:
    """Issue an `OnwardWarning` that points at the user's line, however deep in the package it occurs."""
    depth = 1
    while (frame := sys._getframe(depth)).f_back is not None and _is_internal(frame.f_code.co_filename):
        depth += 1
    warnings.warn(message, OnwardWarning, stacklevel=depth + 1)


def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL_FILES) or file.endswith(_DECORATORS)


class NativeUnavailableError(OnwardError, ValueError):
    """The native library was not built, or the machine lacks the requested one."""


class NativeError(OnwardError):
    """A kernel rejected its arguments, or could not allocate memory."""
