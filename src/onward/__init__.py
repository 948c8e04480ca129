"""Onward: text from autoregressive transformers on PyTorch.

lm = onward.load("demo")
print(lm.generate("Once upon a time").text)
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward import ops
    from onward.cache import KVCache
    from onward.completion import Completion, Piece, Timing
    from onward.constraints import Constraint
    from onward.decoding import (
        DecodeOutput,
        FilledCache,
        Inferencer,
        ModelInferencer,
        PrefillOutput,
        decode,
        generate,
        stream,
    )
    from onward.engine import Engine, EngineStats, Generation
    from onward.errors import EngineBusyError, EngineError, OnwardError
    from onward.language_model import LanguageModel
    from onward.loading import load
    from onward.messages import AssistantMessage, MessageDelta, ToolCall
    from onward.models import Model
    from onward.native import num_threads, set_num_threads
    from onward.program import Program, compile
    from onward.quantization import quantize
    from onward.requests import ChatOptionsDict, GenerateOptions, GenerateOptionsDict, Request, Score
    from onward.sampling import Sampler, SamplingParams, greedy, sample
    from onward.sessions import Session
    from onward.speculation import Speculation, Speculator

__version__ = "0.1.0"

# Quiet unless the application asks: logging.basicConfig(level=logging.INFO), or a level of the logger "onward".
logging.getLogger("onward").addHandler(logging.NullHandler())

__all__ = [
    "AssistantMessage",
    "ChatOptionsDict",
    "Completion",
    "Constraint",
    "DecodeOutput",
    "Engine",
    "EngineBusyError",
    "EngineError",
    "EngineStats",
    "FilledCache",
    "GenerateOptions",
    "GenerateOptionsDict",
    "Generation",
    "Inferencer",
    "KVCache",
    "LanguageModel",
    "MessageDelta",
    "Model",
    "ModelInferencer",
    "OnwardError",
    "Piece",
    "PrefillOutput",
    "Program",
    "Request",
    "Sampler",
    "SamplingParams",
    "Score",
    "Session",
    "Speculation",
    "Speculator",
    "Timing",
    "ToolCall",
    "__version__",
    "compile",
    "decode",
    "generate",
    "greedy",
    "load",
    "num_threads",
    "ops",
    "quantize",
    "sample",
    "set_num_threads",
    "stream",
]

# Importing torch takes a second, and `onward --help` should not. So names are imported when they are first used.
_HOMES = {
    "AssistantMessage": "onward.messages",
    "ChatOptionsDict": "onward.requests",
    "Completion": "onward.completion",
    "Constraint": "onward.sampling",
    "DecodeOutput": "onward.decoding",
    "Engine": "onward.engine",
    "EngineBusyError": "onward.errors",
    "EngineError": "onward.errors",
    "EngineStats": "onward.engine",
    "FilledCache": "onward.decoding",
    "GenerateOptions": "onward.requests",
    "GenerateOptionsDict": "onward.requests",
    "Generation": "onward.engine",
    "Inferencer": "onward.decoding",
    "KVCache": "onward.cache",
    "LanguageModel": "onward.language_model",
    "MessageDelta": "onward.messages",
    "Model": "onward.models",
    "ModelInferencer": "onward.decoding",
    "OnwardError": "onward.errors",
    "Piece": "onward.completion",
    "PrefillOutput": "onward.decoding",
    "Program": "onward.program",
    "Request": "onward.requests",
    "Sampler": "onward.sampling",
    "SamplingParams": "onward.sampling",
    "Score": "onward.requests",
    "Session": "onward.sessions",
    "Speculation": "onward.speculation",
    "Speculator": "onward.speculation",
    "Timing": "onward.completion",
    "ToolCall": "onward.messages",
    "compile": "onward.program",
    "decode": "onward.decoding",
    "generate": "onward.decoding",
    "greedy": "onward.sampling",
    "load": "onward.loading",
    "num_threads": "onward.native",
    "quantize": "onward.quantization",
    "sample": "onward.sampling",
    "set_num_threads": "onward.native",
    "stream": "onward.decoding",
}
_SUBMODULES = {
    "cache",
    "checkpoint",
    "completion",
    "constraints",
    "decoding",
    "engine",
    "errors",
    "language_model",
    "loading",
    "messages",
    "models",
    "native",
    "openai",
    "ops",
    "program",
    "quantization",
    "requests",
    "sampling",
    "server",
    "sessions",
    "speculation",
    "testing",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"onward.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'onward' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next look-up is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
