"""Read weights, tokenizers and chat templates from folders, GGUF files and hub ids."""

from onward.checkpoint.chat_template import ChatTemplate, Message
from onward.checkpoint.folder import CheckpointFolder
from onward.checkpoint.gguf import GgufCheckpoint
from onward.checkpoint.shards import page_releaser
from onward.checkpoint.source import Checkpoint, find_adapter, find_folder, open_checkpoint
from onward.checkpoint.tokenizer import JsonTokenizer, SpecialTokens, Tokenizer, special_tokens
from onward.checkpoint.weights import read_weights

__all__ = [
    "ChatTemplate",
    "Checkpoint",
    "CheckpointFolder",
    "GgufCheckpoint",
    "JsonTokenizer",
    "Message",
    "SpecialTokens",
    "Tokenizer",
    "find_adapter",
    "find_folder",
    "open_checkpoint",
    "page_releaser",
    "read_weights",
    "special_tokens",
]
