"""Adapters: low-rank updates of a model's weights (LoRA, arXiv 2106.09685), in peft's file format."""

from onward.models.adapters.merge import Adapter, Update, grown, merged_model, merged_params
from onward.models.adapters.registry import Adapters, LoadedAdapter
from onward.models.adapters.steering import RowSteers, Steer, SteerAt, Steering, TableUpdate
from onward.models.adapters.trained import LORA_TARGETS, TrainedAdapter

__all__ = [
    "LORA_TARGETS", "Adapter", "Adapters", "LoadedAdapter", "RowSteers", "Steer", "SteerAt", "Steering", "TableUpdate",
    "TrainedAdapter", "Update", "grown", "merged_model", "merged_params",
]  # fmt: skip
