"""Every error that Onward raises on purpose.

A message says what was got, what was wanted and what to do. The command line prints it as one line and exits with 2.
Any other exception is a defect in Onward and keeps its traceback. Built-in bases stand in parentheses.

    OnwardError                              itself: logits that are NaN or infinite where a token is chosen
    ├── RequestError (ValueError)            an option, a prompt or an argument cannot be served
    │   ├── ContextOverflowError             a request needs more positions than the context or the cache holds
    │   ├── NothingToDrawError               bans or a constraint leave no id to choose
    │   ├── TextError                        text is not UTF-8, JSON or Unicode, or nested too deep
    │   ├── UnsupportedModuleError           a module of transformers runs over its own caches alone (onward.models)
    │   └── BodyError                        a body of OpenAI's format asks for what is not served (onward.protocols)
    ├── ConfigError (ValueError)             config.json is missing, unreadable or contradicts itself
    │   └── UnsupportedArchitectureError     Onward does not have the checkpoint's family
    ├── CheckpointError                      weights are missing, truncated, mis-shaped or of a wrong dtype
    ├── SessionError                         a session cannot be saved, or a file is no session of this model
    ├── TokenizerError                       there is no tokenizer, or it or its template cannot be read or lacks a part
    ├── DraftError                           a drafter failed, or proposed ids that are no draft
    ├── EngineError                          an engine is closed, or its thread has failed
    │   └── EngineBusyError                  an engine's queue is full
    ├── RankError                            another process that holds a part of the model has ended or failed
    ├── ProgramError                         a forward cannot be compiled, or a program does not fit the call
    │   ├── TraceError                       a forward cannot be traced (onward.program)
    │   └── MissingKernelsError              a forward uses operators that have no kernel (onward.program)
    ├── NativeUnavailableError (ValueError)  there is no native library, or not the one asked for (onward.native)
    ├── NativeError                          a kernel refused its arguments or found no memory (onward.native)
    └── SourceError                          a folder or hub id does not exist or cannot be reached

    OnwardWarning (UserWarning)              something is legal, but probably not what was meant
"""

import functools
import sys
import warnings
from pathlib import Path


class OnwardError(Exception):
    """The root of the tree: catch this to catch them all."""


class RequestError(OnwardError, ValueError):
    """An option, a prompt or an argument cannot be served."""


class ContextOverflowError(RequestError):
    """A request needs more positions than the context or the cache holds."""


class NothingToDrawError(RequestError):
    """The bans of ids, words and repetitions, or a constraint, leave no id to choose at some position."""


class ConfigError(OnwardError, ValueError):
    """A model's configuration is missing, unreadable or contradicts itself."""


class UnsupportedArchitectureError(ConfigError):
    """Onward does not have the checkpoint's family."""


class CheckpointError(OnwardError):
    """Weights are missing, truncated, mis-shaped or of a dtype that cannot be read."""


class TokenizerError(OnwardError):
    """There is no tokenizer, or it or its chat template cannot be read or lacks what is asked of it."""


class SessionError(OnwardError):
    """A session cannot be saved; or a file cannot be read, is damaged, is no session or is one of another model."""


class SourceError(OnwardError):
    """A folder or hub id does not exist or cannot be reached."""


class DraftError(OnwardError):
    """A drafter failed, or proposed ids or probabilities that are no draft."""


class EngineError(OnwardError):
    """An engine takes no requests: it is closed, its thread has failed, or this is a forked child."""


class EngineBusyError(EngineError):
    """An engine's queue is full. retry_after: seconds after which there is room, as far as its pace tells."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type["EngineBusyError"], tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class RankError(OnwardError):
    """Another process that holds a part of the model has ended, failed or cannot be reached."""


class ProgramError(OnwardError):
    """A forward cannot be compiled, or a program does not fit the call: it was compiled for other inputs."""


class OnwardWarning(UserWarning):
    """Something legal that is probably not what was meant."""


def one_line(error: BaseException) -> str:
    """The message of another library's error on one line, to quote in a message of ours."""
    return " ".join(str(error).split()) or type(error).__name__


# Files that a warning never points at: the package's own, functools.py, which stands between a cached property and its
# caller, and torch's, which stands between a function under `inference_mode` and its caller. (Importing torch for its
# path would cost every error a second.)
_INTERNAL_FILES = (str(Path(__file__).parent), functools.__file__)
_DECORATORS = str(Path("torch", "utils", "_contextlib.py"))


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """`warn`, but the same message only once in a process."""
    if message not in _warned:
        _warned.add(message)
        warn(message)


def warn(message: str) -> None:
    """Issue an `OnwardWarning` that points at the user's line, however deep in the package it arises."""
    depth = 1
    while (frame := sys._getframe(depth)).f_back is not None and _is_internal(frame.f_code.co_filename):
        depth += 1
    warnings.warn(message, OnwardWarning, stacklevel=depth + 1)


def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL_FILES) or file.endswith(_DECORATORS)


class NativeUnavailableError(OnwardError, ValueError):
    """No native library serves the request: none was built, or the machine lacks the one asked for."""


class NativeError(OnwardError):
    """A kernel refused its arguments, or could not allocate memory."""
