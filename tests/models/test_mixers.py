"""Every mixer declares what a decoder needs: neither "no rotation" nor "sees everything" is assumed."""

import pytest

from onward.models.blocks.attention import Attention, LatentAttention
from onward.models.blocks.recurrent import GatedDelta, Mamba2, ParallelMixer, ShortConvMixer


@pytest.mark.parametrize("mixer", [Attention, GatedDelta, ShortConvMixer, Mamba2, LatentAttention, ParallelMixer])
@pytest.mark.parametrize("name", ["cached", "rope"])
def test_every_mixer_declares_the_interface_of_decoders(mixer: type, name: str) -> None:
    assert hasattr(mixer, name) or name in mixer.__dataclass_fields__
