"""Read weights, tokenizers and chat templates from folders, GGUF files and hub ids."""

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.embedding_format import EmbeddingFormat
from onward.checkpoint.gguf.checkpoint import GgufCheckpoint
from onward.checkpoint.peft import read_adapter
from onward.checkpoint.shards import page_releaser
from onward.checkpoint.source import Checkpoint, find_adapter, find_folder, open_checkpoint
from onward.checkpoint.weights import read_weights

__all__ = [
    "Checkpoint", "CheckpointFolder", "EmbeddingFormat", "GgufCheckpoint", "find_adapter", "find_folder",
    "open_checkpoint", "page_releaser", "read_adapter", "read_weights",
]  # fmt: skip
