"""The decode loop with its sequences, slots, steps and schedules, and drivers for user-defined forwards."""

from onward.decoding.api import decode, generate, stream
from onward.decoding.batch import ScheduledSequence
from onward.decoding.beam import BeamOptions, BeamSearch, BeamStep
from onward.decoding.cache_manager import CacheManager
from onward.decoding.loop import BatchSchedule, Schedule, StepRouter, decode_loop
from onward.decoding.row_cache import RowCacheManager
from onward.decoding.sequence import FinishReason, Sequence, StoppedBy, StopWhen
from onward.decoding.shared_cache import SharedCache, slots_for
from onward.decoding.step import DecodeStep, FunctionSampler, SamplerCache, Select, Step, TokenSampler

__all__ = [
    "BatchSchedule", "BeamOptions", "BeamSearch", "BeamStep", "CacheManager", "DecodeStep", "FinishReason",
    "FunctionSampler", "RowCacheManager", "SamplerCache", "Schedule", "ScheduledSequence", "Select", "Sequence",
    "SharedCache", "Step", "StepRouter", "StopWhen", "StoppedBy", "TokenSampler", "decode", "decode_loop", "generate",
    "slots_for", "stream",
]  # fmt: skip
