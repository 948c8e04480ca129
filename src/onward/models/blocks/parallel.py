"""Attention and a recurrent mixer in parallel (Falcon-H1, arXiv 2507.22448)."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from onward import ops
from onward.models.architecture import WeightScope
from onward.models.blocks.attention import Attention, AttentionParams
from onward.models.blocks.layer import AttentionAndState, LayerCache
from onward.models.blocks.mamba2 import Mamba2, Mamba2Params
from onward.models.blocks.norm import multiplied
from onward.models.blocks.positions import Positions
from onward.models.rope import RotarySchedule


class ParallelMixerParams(NamedTuple):
    attention: AttentionParams
    recurrent: Mamba2Params


@dataclass(frozen=True)
class ParallelMixer:
    """The sum of attention and Mamba2 on the same input. attention_in, attention_out, recurrent_out: factors of
    attention's input and output, and of Mamba2's output."""

    attention: Attention
    recurrent: Mamba2
    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_out: float = 1.0

    @property
    def cached(self) -> AttentionAndState:
        assert self.attention.cached is not None
        return AttentionAndState(self.attention.cached, self.recurrent.cached)

    @property
    def rope(self) -> RotarySchedule | None:
        return self.attention.rope

    @property
    def kv_source_layer(self) -> int | None:
        return self.attention.kv_source_layer

    @property
    def window(self) -> int | None:
        return self.attention.window

    def read(self, scope: WeightScope) -> ParallelMixerParams:
        return ParallelMixerParams(
            self.attention.read(scope.under("self_attn")), self.recurrent.read(scope.under("mamba"))
        )

    def __call__(
        self,
        params: ParallelMixerParams,
        x_BTD: Tensor,
        positions: Positions,
        cache: LayerCache,
        index: tuple[int, int],
    ) -> Tensor:
        place, state = index
        recurrent = self.recurrent(params.recurrent, x_BTD, positions, cache, state)
        attended = self.attention(params.attention, multiplied(x_BTD, self.attention_in), positions, cache, place)
        return ops.add(multiplied(recurrent, self.recurrent_out), multiplied(attended, self.attention_out))
