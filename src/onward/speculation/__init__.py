"""Speculation: a drafter guesses tokens, and one pass of the model verifies several. docs/speculation.md explains."""

from onward.speculation.drafter import (
    Drafter,
    Drafting,
    DraftRequest,
    DraftRow,
    Speculation,
    TokenTable,
    check_same_tokens,
)
from onward.speculation.inferencers import SpeculateOutput, speculate
from onward.speculation.lookup import PredictedText, PromptLookup
from onward.speculation.model_drafter import ModelDrafter
from onward.speculation.speculator import LOOKUPS, ModelHolder, Speculator, as_drafter
from onward.speculation.step import SpeculativeStep
from onward.speculation.suffix import SuffixLookup

__all__ = [
    "LOOKUPS",
    "DraftRequest",
    "DraftRow",
    "Drafter",
    "Drafting",
    "ModelDrafter",
    "ModelHolder",
    "PredictedText",
    "PromptLookup",
    "SpeculateOutput",
    "Speculation",
    "SpeculativeStep",
    "Speculator",
    "SuffixLookup",
    "TokenTable",
    "as_drafter",
    "check_same_tokens",
    "speculate",
]
