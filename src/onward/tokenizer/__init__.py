"""Tokenizers, and the text of a stream of tokens."""

from onward.tokenizer.text_stream import NoTextStream, StopStrings, StreamingDetokenizer, TextStream
from onward.tokenizer.tokenizer import JsonTokenizer, SpecialTokens, TextLengths, Tokenizer, special_tokens

__all__ = [
    "JsonTokenizer", "NoTextStream", "SpecialTokens", "StopStrings", "StreamingDetokenizer", "TextLengths",
    "TextStream", "Tokenizer", "special_tokens",
]  # fmt: skip
