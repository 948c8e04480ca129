"""Onward: text from autoregressive transformers on PyTorch.

lm = onward.load("demo")
print(lm.generate("Once upon a time").text)
"""

import logging
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Quiet unless the application asks: logging.basicConfig(level=logging.INFO), or a level of the logger "onward".
logging.getLogger("onward").addHandler(logging.NullHandler())

# Every public name, by the module that defines it. Importing torch takes a second, and `onward --help` should not; so a
# name is imported when it is first used. Type checkers read __init__.pyi, which .ci/generate.py writes from here.
_MODULES = {
    "cache": "KVCache",
    "chat": "AssistantMessage MessageDelta ToolCall",
    "decoding": "decode generate stream",
    "decoding.speculation": "Speculation Speculator",
    "engine": "Engine EngineStats Generation",
    "errors": "EngineBusyError EngineError OnwardError",
    "language_model": "ChatOptionsDict Completion GenerateOptions GenerateOptionsDict LanguageModel Piece "
    "Receipt Replay Request Score Session Timing Verification quantize",
    "language_model.steering": "read_control_vector",
    "loading": "load",
    "models": "Model",
    "models.adapters": "Steer",
    "native": "num_threads set_num_threads",
    "ops.tap": "tap",
    "program": "Program compile",
    "sampling": "Constraint Sampler SamplingParams greedy sample",
}
# fmt: off
_SUBMODULES = [
    "cache", "chat", "checkpoint", "constraints", "decoding", "engine", "errors", "inferencer", "language_model",
    "loading", "models", "native", "ops", "program", "protocols", "quantization", "sampling", "server", "testing",
    "tokenizer",
]
# fmt: on
_HOMES = {name: f"onward.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", "ops", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"onward.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'onward' has no attribute {name!r}")
    from onward.util.process import without_collections

    with without_collections(long_lived=True):  # a tenth of the time that the imports take
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next look-up is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
