"""Rotary position embedding: from a checkpoint's RoPE fields to the angles of every position."""

from onward.models.rope.fields import rope_fields, rotary_schedule
from onward.models.rope.longrope import LongRope
from onward.models.rope.scaling import Dynamic, Linear, Llama3, Proportional, Scaling, Unscaled
from onward.models.rope.schedule import RotarySchedule
from onward.models.rope.yarn import Yarn, yarn_magnitude

__all__ = [
    "Dynamic",
    "Linear",
    "Llama3",
    "LongRope",
    "Proportional",
    "RotarySchedule",
    "Scaling",
    "Unscaled",
    "Yarn",
    "rope_fields",
    "rotary_schedule",
    "yarn_magnitude",
]
