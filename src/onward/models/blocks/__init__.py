"""The building blocks of model families: frozen dataclasses of hyperparameters.

`read(scope)` reads a block's weights from a checkpoint and returns them as params, a NamedTuple or a tensor. Calling
the block with these params computes it.
"""

from onward.models.blocks.attention import Attention, AttentionNames, AttentionParams
from onward.models.blocks.decoder import Decoder, DecoderNames, DecoderParams
from onward.models.blocks.experts import DenseAndExperts, DenseAndExpertsParams, ExpertNames, Experts, ExpertsParams
from onward.models.blocks.feed_forward import FeedForward, FeedForwardNames, FeedForwardParams, UngatedFeedForward
from onward.models.blocks.gated_delta import GatedDelta, GatedDeltaParams
from onward.models.blocks.layer import DecoderLayer, LayerNames, LayerParams
from onward.models.blocks.mamba2 import Mamba2, Mamba2Params
from onward.models.blocks.mla import LatentAttention, LatentAttentionParams
from onward.models.blocks.norm import RMSNorm
from onward.models.blocks.parallel import ParallelMixer, ParallelMixerParams
from onward.models.blocks.per_layer_embeddings import (
    PerLayerEmbeddings,
    PerLayerEmbeddingsParams,
    PerLayerInput,
    PerLayerInputParams,
)
from onward.models.blocks.positions import AttentionTemperature, Positions
from onward.models.blocks.short_conv import ShortConvMixer, ShortConvMixerParams

__all__ = [
    "Attention",
    "AttentionNames",
    "AttentionParams",
    "AttentionTemperature",
    "Decoder",
    "DecoderLayer",
    "DecoderNames",
    "DecoderParams",
    "DenseAndExperts",
    "DenseAndExpertsParams",
    "ExpertNames",
    "Experts",
    "ExpertsParams",
    "FeedForward",
    "FeedForwardNames",
    "FeedForwardParams",
    "GatedDelta",
    "GatedDeltaParams",
    "LatentAttention",
    "LatentAttentionParams",
    "LayerNames",
    "LayerParams",
    "Mamba2",
    "Mamba2Params",
    "ParallelMixer",
    "ParallelMixerParams",
    "PerLayerEmbeddings",
    "PerLayerEmbeddingsParams",
    "PerLayerInput",
    "PerLayerInputParams",
    "Positions",
    "RMSNorm",
    "ShortConvMixer",
    "ShortConvMixerParams",
    "UngatedFeedForward",
]
