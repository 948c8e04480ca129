"""Speculative decoding: a drafter guesses tokens, and one forward verifies several (docs/speculation.md)."""

from onward.decoding.speculation.drafter import (
    Drafter,
    Drafting,
    DraftRow,
    DraftTarget,
    Speculation,
    TokenTable,
    check_same_tokens,
)
from onward.decoding.speculation.head_drafter import HeadDrafter
from onward.decoding.speculation.lookup import PredictedOutput, PromptLookup, SuffixLookup
from onward.decoding.speculation.model_drafter import ModelDrafter
from onward.decoding.speculation.speculator import LOOKUPS, ModelHolder, Speculator, SpeculatorCache, as_drafter
from onward.decoding.speculation.step import SpeculativeStep

__all__ = [
    "LOOKUPS", "DraftRow", "DraftTarget", "Drafter", "Drafting", "HeadDrafter", "ModelDrafter", "ModelHolder",
    "PredictedOutput", "PromptLookup", "Speculation", "SpeculativeStep", "Speculator", "SpeculatorCache",
    "SuffixLookup", "TokenTable", "as_drafter", "check_same_tokens",
]  # fmt: skip
