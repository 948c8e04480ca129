"""Test doubles for your own models, drafters, samplers and loops.

model = onward.testing.scripted_model([5, 6, 7])        # predicts a script, and raises if misused
model = onward.testing.tiny_model("llama", seed=1)      # a real decoder with random weights
path = onward.testing.random_checkpoint(folder)         # the same on disk, for `onward.load`
lm = onward.LanguageModel(model, onward.testing.ByteTokenizer())
"""

from onward.testing.scripted import (
    ByteTokenizer,
    ContractError,
    Script,
    ScriptedCache,
    ScriptedCall,
    ScriptedModel,
    poison,
    scripted_model,
)
from onward.testing.tiny import random_checkpoint, tiny_config, tiny_model

__all__ = [
    "ByteTokenizer", "ContractError", "Script", "ScriptedCache", "ScriptedCall", "ScriptedModel", "poison",
    "random_checkpoint", "scripted_model", "tiny_config", "tiny_model",
]  # fmt: skip
