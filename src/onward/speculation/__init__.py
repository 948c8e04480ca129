"""Speculation: a drafter guesses tokens, and one pass of the model verifies several. docs/speculation.md explains."""

from onward.speculation.counts import Speculation
from onward.speculation.drafter import Drafter, Drafting, DraftRequest, DraftRow
from onward.speculation.drafters import LOOKUPS, ModelHolder, as_drafter
from onward.speculation.inferencers import SpeculateOutput, speculate
from onward.speculation.lookup import PromptLookup
from onward.speculation.model_drafter import ModelDrafter
from onward.speculation.predicted import PredictedText
from onward.speculation.speculator import Speculator
from onward.speculation.step import SpeculativeStep
from onward.speculation.suffix import SuffixLookup
from onward.speculation.vocabulary import TokenTable, check_same_tokens

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
