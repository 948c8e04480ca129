"""Adapters: low-rank updates of a model's weights (LoRA, arXiv 2106.09685), in peft's file format."""

from onward.models.adapters.merge import Adapter, Update, grown, merged_model, merged_params
from onward.models.adapters.registry import Adapters, LoadedAdapter

__all__ = ["Adapter", "Adapters", "LoadedAdapter", "Update", "grown", "merged_model", "merged_params"]
