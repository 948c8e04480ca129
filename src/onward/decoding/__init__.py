"""The one loop: state, step, stop, streaming text, and a driver for anyone's function."""

from onward.decoding.detokenizer import StreamingDetokenizer
from onward.decoding.driver import decode, stream
from onward.decoding.inferencer import DecodeOutput, FilledCache, Inferencer, ModelInferencer, PrefillOutput
from onward.decoding.loop import Emission, decode_loop
from onward.decoding.row import Row
from onward.decoding.state import DecodeState
from onward.decoding.step import DecodeStep, Picker, Select, Step, Token, TokenLogprobs
from onward.decoding.tensors import generate
from onward.decoding.text import NoText, StopStrings, TextStream

__all__ = [
    "DecodeOutput",
    "DecodeState",
    "DecodeStep",
    "Emission",
    "FilledCache",
    "Inferencer",
    "ModelInferencer",
    "NoText",
    "Picker",
    "PrefillOutput",
    "Row",
    "Select",
    "Step",
    "StopStrings",
    "StreamingDetokenizer",
    "TextStream",
    "Token",
    "TokenLogprobs",
    "decode",
    "decode_loop",
    "generate",
    "stream",
]
