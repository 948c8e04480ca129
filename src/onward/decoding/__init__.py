"""The one decode loop: its state, its steps, its rows and their text; and drivers for a forward of the user's own."""

from onward.decoding.beam import BeamOptions, BeamStep
from onward.decoding.detokenizer import StreamingDetokenizer
from onward.decoding.driver import decode, stream
from onward.decoding.inferencer import DecodeOutput, FilledCache, Inferencer, ModelInferencer, PrefillOutput
from onward.decoding.loop import Emission, decode_loop
from onward.decoding.prefill import PromptLogprobs, prefilled, spread
from onward.decoding.prefix import HeldCache, PrefixCache, PrefixTurn
from onward.decoding.row import FinishReason, Row, StoppedBy, StopWhen
from onward.decoding.state import DecodeState
from onward.decoding.step import DecodeStep, Picker, Select, Step, Token, TokenLogprobs
from onward.decoding.tensors import generate
from onward.decoding.text import NoText, StopStrings, TextStream

__all__ = [
    "BeamOptions",
    "BeamStep",
    "DecodeOutput",
    "DecodeState",
    "DecodeStep",
    "Emission",
    "FilledCache",
    "FinishReason",
    "HeldCache",
    "Inferencer",
    "ModelInferencer",
    "NoText",
    "Picker",
    "PrefillOutput",
    "PrefixCache",
    "PrefixTurn",
    "PromptLogprobs",
    "Row",
    "Select",
    "Step",
    "StopStrings",
    "StopWhen",
    "StoppedBy",
    "StreamingDetokenizer",
    "TextStream",
    "Token",
    "TokenLogprobs",
    "decode",
    "decode_loop",
    "generate",
    "prefilled",
    "spread",
    "stream",
]
