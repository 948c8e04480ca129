"""What a decoder asks of its mixers, every mixer declares: none is taken to turn nothing and to see all by default."""

import pytest

from onward.models.blocks.attention import Attention
from onward.models.blocks.gated_delta import GatedDelta
from onward.models.blocks.mamba2 import Mamba2
from onward.models.blocks.mla import LatentAttention
from onward.models.blocks.parallel import ParallelMixer
from onward.models.blocks.short_conv import ShortConvMixer


@pytest.mark.parametrize("mixer", [Attention, GatedDelta, ShortConvMixer, Mamba2, LatentAttention, ParallelMixer])
@pytest.mark.parametrize("name", ["cached", "rope", "kv_source_layer", "window"])
def test_every_mixer_declares_what_a_decoder_asks(mixer: type, name: str) -> None:
    assert hasattr(mixer, name) or name in mixer.__dataclass_fields__
