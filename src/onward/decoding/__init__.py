"""The one loop: state, step, stop, streaming text, and a driver for anyone's function."""

from onward.decoding.detokenizer import StreamingDetokenizer
from onward.decoding.driver import decode, stream
from onward.decoding.loop import Emission, decode_loop
from onward.decoding.row import Row
from onward.decoding.state import DecodeState
from onward.decoding.step import DecodeStep, Select, Step
from onward.decoding.text import NoText, StopStrings, TextStream

__all__ = [
    "DecodeState",
    "DecodeStep",
    "Emission",
    "NoText",
    "Row",
    "Select",
    "Step",
    "StopStrings",
    "StreamingDetokenizer",
    "TextStream",
    "decode",
    "decode_loop",
    "stream",
]
