"""A stage of a pipeline: the layers of one rank, as a model of its own that reads no other weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache.kinds import lazy_zeros
from onward.errors import RequestError
from onward.models import Architecture, Embedding, WeightScope
from onward.models.architecture import parameter_shapes
from onward.models.blocks import Decoder, DecoderParams, LayerParams
from onward.models.contract import take_positions


def divide_layers(costs: Sequence[int], world: int, ends: int) -> list[range]:
    """Runs of layers, one for each rank, of which the most expensive costs as little as can be.

    costs: of each layer. ends: what rank 0 has to do besides: the head.

    Raises:
        RequestError: more ranks than layers.
    """
    count = len(costs)
    if world > count:
        raise RequestError(f"a pipeline of {world} ranks needs as many layers, and the model has {count}: give fewer")
    before = [0, *accumulate(costs)]
    # least[k] and first[rank][k]: the least cost of the dearest of so many ranks over the first k layers, and where
    # the last of them begins.
    least: list[float] = [float("inf"), *(ends + before[k] for k in range(1, count + 1))]
    begins: list[list[int]] = [[0] * (count + 1)]
    for rank in range(1, world):
        options = [
            min(((max(least[i], before[k] - before[i]), i) for i in range(rank, k)), default=(float("inf"), 0))
            for k in range(count + 1)
        ]
        least, begins = [cost for cost, _ in options], [*begins, [begin for _, begin in options]]
    ranges: list[range] = []
    end = count
    for begin_of in reversed(begins):
        ranges.append(range(begin_of[end], end))
        end = ranges[-1].start
    return ranges[::-1]


# The most tokens of one forward.
MOST_TOKENS = 2**15


class StageParams(NamedTuple):
    """The weights of a rank without the ends of the model.

    embed_tokens: the hidden states of the rank before, as a table to look up; None until there is one.
    """

    embed_tokens: Embedding | None
    layers: tuple[LayerParams, ...]


class HeadParams(NamedTuple):
    """hidden: what came from the last rank, as a table. rest: the norm and the head, among rank 0's weights."""

    hidden: Embedding
    rest: DecoderParams


@dataclass(frozen=True)
class Stage(Decoder):
    """Some layers of a decoder. Rank 0's begin with the embedding, and it has the last norm and the head, too.

    Hidden states come in as rows of a table that are looked up, and go out in the place of logits. So a stage is traced
    and run like any model.

    first: the place of its first layer among all.
    """

    first: int = 0

    @property
    def begins(self) -> bool:
        """Whether it is rank 0's."""
        return self.first == 0

    def read(self, scope: WeightScope, each_layer: Callable[[LayerParams], LayerParams] = lambda layer: layer) -> Any:
        if self.begins:
            return super().read(scope, each_layer)
        below = scope.under(self.names.layers)
        layers = [each_layer(layer.read(below.under(self.first + i))) for i, layer in enumerate(self.layers)]
        return StageParams(None, tuple(layers))

    def hidden(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """What goes to the next rank, float [B, T, D], or [R, N, D]. tokens: of later ranks rows of their table."""
        x_BTD, positions, _ = self.embedded(tokens, offsets, params)
        for layer, layer_params, index in zip(self.layers, params.layers, self.places(), strict=True):
            x_BTD = layer(layer_params, x_BTD, positions, cache, index)
        return x_BTD if logits_at is None else take_positions(x_BTD, logits_at), cache

    def head(self, tokens: Tensor, offsets: Tensor, cache: Any, params: HeadParams) -> tuple[Tensor, Any]:
        """The logits of rows [B, T] of the table."""
        return self.logits(params.rest, self.norm(params.rest.norm, params.hidden(tokens))), cache


def stage_of(architecture: Architecture, rank: int, world: int) -> Stage:
    """The part of a rank. Raises `RequestError`: a family that cannot be cut between layers, or more ranks than
    layers."""
    decoder = _cuttable(architecture)
    shares = any(layer.mixer is not None and layer.mixer.kv_source_layer is not None for layer in decoder.layers)
    if decoder.layer_embeddings is not None or shares:
        raise RequestError(
            "pipeline= cannot cut a model whose layers share keys, values or embeddings (Gemma 3n and 4)"
        )
    sizes = {name: torch.Size(shape).numel() for name, shape in parameter_shapes(decoder).items()}
    prefixes = [f"{decoder.names.layers}.{index}." for index in range(len(decoder.layers))]
    costs = [sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in prefixes]
    own = divide_layers(costs, world, ends=decoder.vocab_size * decoder.hidden_size)[rank]
    ends = decoder.names
    others = [prefix for index, prefix in enumerate(prefixes) if index not in own]
    others += [f"{name}." for name in (ends.embed_tokens, ends.norm, ends.lm_head) if rank > 0]
    given = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    given |= {"layers": decoder.layers[own.start : own.stop], "unread": (*decoder.unread, *others)}
    if rank > 0:
        given["embedding_multiplier"] = 1.0
    return Stage(**given, first=own.start)


def _cuttable(architecture: Architecture) -> Decoder:
    """The decoder of a family, if ranks may share it. Raises `RequestError`: it is another kind of model, or has
    recurrent layers."""
    if not isinstance(architecture, Decoder):
        raise RequestError(
            f"pipeline= is for decoders of the common blocks, and this is a {type(architecture).__name__}"
        )
    if architecture.states:
        raise RequestError(f"pipeline= cannot cut a model with recurrent layers ({_mixers(architecture)}) yet")
    return architecture


def _mixers(decoder: Decoder) -> str:
    return ", ".join(sorted({type(layer.mixer).__name__ for layer in decoder.layers if layer.mixer is not None}))


def hidden_states(width: int, dtype: torch.dtype) -> Tensor:
    """A table for the hidden states of a forward's tokens, which takes memory as it is written."""
    return lazy_zeros((MOST_TOKENS, width), dtype, torch.device("cpu"))


def rows_of_table(rows: int, tokens: int) -> Tensor:
    """int32 [B, T]: where a forward's hidden states lie in the table."""
    return torch.arange(rows * tokens, dtype=torch.int32).view(rows, tokens)
