"""The building blocks of model families: frozen dataclasses of hyperparameters.

`read(scope)` reads a block's weights from a checkpoint and returns them as params, a NamedTuple or a tensor. Calling
the block with these params computes it.
"""

from onward.models.blocks.attention import Attention, AttentionNames, LatentAttention
from onward.models.blocks.decoder import Decoder, DecoderNames, DecoderParams
from onward.models.blocks.experts import DenseAndExperts, ExpertNames, Experts
from onward.models.blocks.feed_forward import (
    FeedForward,
    FeedForwardNames,
    PerLayerEmbeddings,
    PerLayerInput,
    UngatedFeedForward,
)
from onward.models.blocks.layer import AttentionTemperature, DecoderLayer, LayerNames, LayerParams, Positions
from onward.models.blocks.norm import RMSNorm
from onward.models.blocks.recurrent import GatedDelta, Mamba2, ParallelMixer, ShortConvMixer

__all__ = [
    "Attention", "AttentionNames", "AttentionTemperature", "Decoder", "DecoderLayer", "DecoderNames", "DecoderParams",
    "DenseAndExperts", "ExpertNames", "Experts", "FeedForward", "FeedForwardNames", "GatedDelta", "LatentAttention",
    "LayerNames", "LayerParams", "Mamba2", "ParallelMixer", "PerLayerEmbeddings", "PerLayerInput", "Positions",
    "RMSNorm", "ShortConvMixer", "UngatedFeedForward",
]  # fmt: skip
