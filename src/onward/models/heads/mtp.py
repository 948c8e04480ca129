"""Multi-token prediction (MTP) layers of checkpoints: DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4.5, Qwen3-Next
and Qwen3.5. A layer like the model's last one over the normalised embedding and the normalised hidden state."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onward.cache import LayerShape
from onward.errors import CheckpointError, RequestError
from onward.models.architecture import Architecture, WeightScope
from onward.models.blocks import Decoder, DecoderLayer, Positions
from onward.models.blocks.decoder import MtpNames
from onward.models.blocks.layer import LayerCache
from onward.models.contract import NORM
from onward.models.heads.head import DraftHead, Find, HeadParams


@dataclass(frozen=True)
class MtpHead(DraftHead):
    """Passes on its normalised output, as the target does. layer: of its attention and feed-forward block."""

    layer: DecoderLayer
    names: MtpNames
    has_own_folder: ClassVar[bool] = False

    @property
    def cached(self) -> LayerShape:
        assert isinstance(self.layer.cached, LayerShape), "checked in `read_mtp`"
        return self.layer.cached

    def read(self, scope: WeightScope, find: Find) -> HeadParams:
        names, size, norm = self.names, self.target.hidden_size, self.target.norm
        for name in ("embed_tokens.weight", "shared_head.head.weight"):  # copies, in some checkpoints
            copy, shape = find(f"{names.root}.{name}"), [self.target.vocab_size, size]
            if copy is not None and list(copy.shape) != shape:
                raise CheckpointError(
                    f"the MTP layer has another vocabulary or hidden size than the model: {names.root}.{name} is "
                    f"{list(copy.shape)}, and the model's is {shape}"
                )
        scope = scope.under(names.root)
        return HeadParams(
            layer=self.layer.read(scope.under(names.layer)),
            embedding_norm=norm.read(scope.under(names.embedding_norm)),
            hidden_norm=norm.read(scope.under(names.hidden_norm)),
            projection=scope.linear(names.projection, size, 2 * size),
            norm=norm.read(scope.under(names.norm)),
        )

    def hidden(
        self, params: HeadParams, embedded: Tensor, features: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        norm = self.target.norm
        pair = [norm(params.embedding_norm, embedded), norm(params.hidden_norm, features)]
        x_BTD = self.layer(params.layer, params.projection(torch.cat(pair, -1)), positions, cache, 0)
        normed = norm(params.norm, x_BTD)
        return normed, normed

    def scaled(self, logits: Tensor) -> Tensor:
        return self.target.scaled(logits)


def read_mtp(target: Architecture | None) -> MtpHead:
    """The MTP head of a model, whose checkpoint has its weights. It shares the model's embedding and lm_head.

    Raises:
        RequestError: the model's family has none.
    """
    if not isinstance(target, Decoder) or target.mtp is None:
        raise RequestError(
            "draft='mtp' drafts with the MTP layer of a checkpoint, and this one has none: DeepSeek-V3, GLM-4.5, "
            "Qwen3-Next and Qwen3.5 have them. 'lookup' and 'suffix' work with any model"
        )
    layer = next(layer for layer in reversed(target.layers) if isinstance(layer.cached, LayerShape))
    return MtpHead(target, (NORM,), layer, target.mtp)
