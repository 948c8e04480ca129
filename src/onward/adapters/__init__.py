"""Adapters: small updates of a model's weights (LoRA, arXiv 2106.09685), in the folders that peft writes."""

from onward.adapters.loaded import Adapters, LoadedAdapter
from onward.adapters.merging import grown, merged_model, merged_params
from onward.adapters.peft_folder import Adapter, Update, read_adapter

__all__ = ["Adapter", "Adapters", "LoadedAdapter", "Update", "grown", "merged_model", "merged_params", "read_adapter"]
