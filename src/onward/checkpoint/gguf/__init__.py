"""Models in GGUF, llama.cpp's format: weights, config, tokenizer and chat template in one file (docs/gguf.md)."""

from onward.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf, parts_of

__all__ = ["GgufCheckpoint", "is_gguf", "parts_of"]
