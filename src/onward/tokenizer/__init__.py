"""Tokenizers, and the text of a stream of tokens."""

from onward.tokenizer.text_stream import NoTextStream, StopStrings, StreamingDetokenizer, TextStream
from onward.tokenizer.tokenizer import JsonTokenizer, SpecialTokens, Tokenizer, special_tokens

__all__ = [
    "JsonTokenizer",
    "NoTextStream",
    "SpecialTokens",
    "StopStrings",
    "StreamingDetokenizer",
    "TextStream",
    "Tokenizer",
    "special_tokens",
]
