"""A pipeline stage: the layers of one rank, as a model that reads no other weights."""

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
    """Divide layers into one range per rank, minimizing the cost of the most expensive rank.

    costs: the cost of each layer. ends: the cost of the head, for rank 0.

    Raises:
        RequestError: more ranks than layers.
    """
    count = len(costs)
    if world > count:
        raise RequestError(f"a pipeline of {world} ranks needs as many layers, and the model has {count}: use fewer")
    total = [0, *accumulate(costs)]
    # By the number k of layers: the minimal cost of the most expensive of the first ranks, and for each of these ranks
    # its first layer.
    best: list[float] = [float("inf"), *(ends + total[k] for k in range(1, count + 1))]
    starts: list[list[int]] = [[0] * (count + 1)]
    for rank in range(1, world):
        options = [
            min(((max(best[i], total[k] - total[i]), i) for i in range(rank, k)), default=(float("inf"), 0))
            for k in range(count + 1)
        ]
        best = [cost for cost, _ in options]
        starts.append([start for _, start in options])
    ranges: list[range] = []
    end = count
    for first_layer in reversed(starts):
        ranges.append(range(first_layer[end], end))
        end = ranges[-1].start
    return ranges[::-1]


# The maximum number of tokens of one forward.
MAX_TOKENS = 2**15


class StageParams(NamedTuple):
    """The layer weights of a rank other than 0.

    embed_tokens: the hidden states of the previous rank, as a lookup table; set after reading.
    """

    embed_tokens: Embedding | None
    layers: tuple[LayerParams, ...]


class HeadParams(NamedTuple):
    """hidden: the hidden states of the last rank, as a table. rest: rank 0's weights, with the norm and the head."""

    hidden: Embedding
    rest: DecoderParams


@dataclass(frozen=True)
class Stage(Decoder):
    """Some layers of a decoder. Rank 0's stage also has the embedding, the final norm and the head.

    Hidden states are passed in as rows of a lookup table and returned in place of logits, so a stage is traced and run
    like any model.

    first: the index of its first layer.
    """

    first: int = 0

    def read(self, scope: WeightScope, each_layer: Callable[[LayerParams], LayerParams] = lambda layer: layer) -> Any:
        if self.first == 0:
            return super().read(scope, each_layer)
        below = scope.under(self.names.layers)
        layers = [each_layer(layer.read(below.under(self.first + i))) for i, layer in enumerate(self.layers)]
        return StageParams(None, tuple(layers))

    def hidden(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Hidden states for the next rank, float [B, T, D] or [R, N, D]. tokens: rows of the table on later ranks."""
        x_BTD, positions, _ = self.embedded(tokens, offsets, params)
        for layer, layer_params, index in zip(self.layers, params.layers, self.places(), strict=True):
            x_BTD = layer(layer_params, x_BTD, positions, cache, index)
        return x_BTD if logits_at is None else take_positions(x_BTD, logits_at), cache

    def head(self, tokens: Tensor, offsets: Tensor, cache: Any, params: HeadParams) -> tuple[Tensor, Any]:
        """The logits of rows [B, T] of the table."""
        return self.logits(params.rest, self.norm(params.rest.norm, params.hidden(tokens))), cache


def stage_of(architecture: Architecture, rank: int, world: int) -> Stage:
    """The stage of a rank. Raises `RequestError`: a family that cannot be split between layers, or more ranks than
    layers."""
    if not isinstance(architecture, Decoder):
        raise RequestError(
            f"pipeline= cannot split a {type(architecture).__name__}, only decoders made of the common blocks"
        )
    decoder = architecture
    mixers = [layer.mixer for layer in decoder.layers if layer.mixer is not None]
    if decoder.states:
        kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
        raise RequestError(f"pipeline= cannot split a model with recurrent layers ({kinds}) yet")
    if decoder.layer_embeddings is not None or any(mixer.kv_source_layer is not None for mixer in mixers):
        raise RequestError(
            "pipeline= cannot split a model whose layers share keys, values or embeddings (Gemma 3n and 4)"
        )
    sizes = {name: torch.Size(shape).numel() for name, shape in parameter_shapes(decoder).items()}
    prefixes = [f"{decoder.names.layers}.{index}." for index in range(len(decoder.layers))]
    costs = [sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in prefixes]
    own = divide_layers(costs, world, ends=decoder.vocab_size * decoder.hidden_size)[rank]
    names = decoder.names
    others = [prefix for index, prefix in enumerate(prefixes) if index not in own]
    others += [f"{name}." for name in (names.embed_tokens, names.norm, names.lm_head) if rank > 0]
    options = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    options |= {"layers": decoder.layers[own.start : own.stop], "unread": (*decoder.unread, *others)}
    if rank > 0:
        options["embedding_multiplier"] = 1.0
    return Stage(**options, first=own.start)


def hidden_states(width: int, dtype: torch.dtype) -> Tensor:
    """A table for the hidden states of a forward's tokens, whose memory is allocated when it is written."""
    return lazy_zeros((MAX_TOKENS, width), dtype, torch.device("cpu"))


def rows_of_table(rows: int, tokens: int) -> Tensor:
    """int32 [B, T], the rows of a forward's hidden states in the table."""
    return torch.arange(rows * tokens, dtype=torch.int32).view(rows, tokens)
