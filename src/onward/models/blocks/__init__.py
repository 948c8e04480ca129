"""What families are made of. A block is a frozen dataclass of its numbers.

`read(scope)` takes its weights from a checkpoint and returns them as params, a NamedTuple or a tensor. Calling the
block with these params computes it.
"""

from onward.models.blocks.attention import Attention, AttentionNames, AttentionParams
from onward.models.blocks.decoder import Decoder, DecoderNames, DecoderParams
from onward.models.blocks.delta import GatedDelta, GatedDeltaParams
from onward.models.blocks.experts import DenseAndExperts, DenseAndExpertsParams, ExpertNames, Experts, ExpertsParams
from onward.models.blocks.feed_forward import FeedForward, FeedForwardNames, FeedForwardParams, UngatedFeedForward
from onward.models.blocks.gated_conv import GatedConv, GatedConvParams
from onward.models.blocks.layer import DecoderLayer, LayerNames, LayerParams
from onward.models.blocks.layer_embeddings import LayerEmbeddings, LayerEmbeddingsParams, LayerInput, LayerInputParams
from onward.models.blocks.mamba2 import Mamba2, Mamba2Params
from onward.models.blocks.mla import LatentAttention, LatentAttentionParams
from onward.models.blocks.norm import RMSNorm
from onward.models.blocks.positions import Positions, QueryGrowth
from onward.models.blocks.side_by_side import SideBySide, SideBySideParams

__all__ = [
    "Attention",
    "AttentionNames",
    "AttentionParams",
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
    "GatedConv",
    "GatedConvParams",
    "GatedDelta",
    "GatedDeltaParams",
    "LatentAttention",
    "LatentAttentionParams",
    "LayerEmbeddings",
    "LayerEmbeddingsParams",
    "LayerInput",
    "LayerInputParams",
    "LayerNames",
    "LayerParams",
    "Mamba2",
    "Mamba2Params",
    "Positions",
    "QueryGrowth",
    "RMSNorm",
    "SideBySide",
    "SideBySideParams",
    "UngatedFeedForward",
]
