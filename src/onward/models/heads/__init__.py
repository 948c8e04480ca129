"""Draft heads: a layer that reads the target's features, and drafts with them. One file for each kind."""

from collections.abc import Callable, Mapping
from typing import Any

from onward.models.architecture import Architecture
from onward.models.heads.eagle3 import read_eagle3
from onward.models.heads.head import DraftHead, HeadCache, HeadParams, head_model
from onward.models.heads.mtp import MtpHead, read_mtp

__all__ = ["HEADS", "DraftHead", "HeadCache", "HeadParams", "MtpHead", "head_model", "head_reader", "read_mtp"]

# (config.json of a head, its target) -> the head
HeadReader = Callable[[Mapping[str, Any], Architecture | None], DraftHead]
# The architecture in the config.json of a head -> the function that reads it.
HEADS: dict[str, HeadReader] = {"LlamaForCausalLMEagle3": read_eagle3, "Eagle3LlamaForCausalLM": read_eagle3}


def head_reader(config: Mapping[str, Any]) -> HeadReader | None:
    """The function that reads a config.json; None if it is of a model and not of a head."""
    name = (config.get("architectures") or [""])[0]
    if name == "LlamaForCausalLM" and "draft_vocab_size" in config:  # of the authors of EAGLE-3
        return read_eagle3
    return HEADS.get(name)
