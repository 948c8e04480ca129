"""The one decode loop: its sequences, slots, steps and schedule; and drivers for a forward of the user's own."""

from onward.decoding.beam import BeamOptions, BeamStep, Search
from onward.decoding.dense_slots import DenseSlots
from onward.decoding.driver import decode, stream
from onward.decoding.forward import Work
from onward.decoding.inferencer import DecodeOutput, FilledCache, Inferencer, ModelInferencer, PrefillOutput
from onward.decoding.kept_slots import KeptSlots, slots_for
from onward.decoding.loop import AllTogether, Emission, Schedule, decode_loop
from onward.decoding.sequence import FinishReason, Sequence, StoppedBy, StopWhen
from onward.decoding.slots import Slots
from onward.decoding.step import Chooser, DecodeStep, SamplingChooser, Select, SelectChooser, Step
from onward.decoding.tensors import generate
from onward.decoding.text import NoText, StopStrings, StreamingDetokenizer, TextStream
from onward.decoding.token import Token, TokenLogprobs

__all__ = [
    "AllTogether",
    "BeamOptions",
    "BeamStep",
    "Chooser",
    "DecodeOutput",
    "DecodeStep",
    "DenseSlots",
    "Emission",
    "FilledCache",
    "FinishReason",
    "Inferencer",
    "KeptSlots",
    "ModelInferencer",
    "NoText",
    "PrefillOutput",
    "SamplingChooser",
    "Schedule",
    "Search",
    "Select",
    "SelectChooser",
    "Sequence",
    "Slots",
    "Step",
    "StopStrings",
    "StopWhen",
    "StoppedBy",
    "StreamingDetokenizer",
    "TextStream",
    "Token",
    "TokenLogprobs",
    "Work",
    "decode",
    "decode_loop",
    "generate",
    "slots_for",
    "stream",
]
