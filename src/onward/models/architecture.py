"""Architectures: a model's configuration, how its weights are read, and its forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onward import ops
from onward.cache import CachePlan, KVCache, KVPool, LayerShape
from onward.errors import RequestError
from onward.models.linear import (
    Embedding,
    ExpertLinear,
    LatentLinear,
    Linear,
    Router,
    ShortConv,
    pack_layer,
    pack_params,
)
from onward.models.live_weights import TrainableWeights
from onward.models.model import Cache, DividedForward, Model, Params
from onward.ops.kv_format import KVFormat


class Tensors(Protocol):
    """The weights of a checkpoint by stock name; raises `CheckpointError` for one that it lacks. dtype: None for the
    model's."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any: ...


class WeightScope(NamedTuple):
    """The weights whose names begin with a prefix, which is "" or ends with a dot."""

    tensors: Tensors
    prefix: str = ""

    def under(self, name: str | int) -> "WeightScope":
        """The weights below a module, such as "self_attn"; "" returns this scope."""
        return self if name == "" else WeightScope(self.tensors, f"{self.prefix}{name}.")

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape, dequantized."""
        weight = self.matrix(name, *shape)
        return weight.dequantize() if isinstance(weight, ops.QuantizedWeight) else weight

    def matrix(self, name: str, *shape: int) -> Any:
        """The tensor of this name and shape as stored: floats or quantized."""
        return self.tensors.take(self.prefix + name, shape)

    def take_float32(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape in float32, regardless of the model's dtype."""
        tensor: Tensor = self.tensors.take(self.prefix + name, shape, torch.float32)
        return tensor

    def linear(self, name: str, out: int, into: int, bias: bool = False) -> Linear:
        """The linear layer `name`: weight [out, into], optional bias [out]."""
        below = self.under(name)
        return Linear(below.matrix("weight", out, into), below.take("bias", out) if bias else None)

    def router(self, name: str, out: int, into: int, bias: bool = False) -> Router:
        """The router `name`: weight [out, into], optional bias [out]."""
        below = self.under(name)
        return Router(below.take("weight", out, into), below.take("bias", out) if bias else None)

    def short_conv(self, name: str, channels: int, kernel_size: int, bias: bool = False) -> ShortConv:
        """The convolution `name`: weight [channels, 1, kernel_size], optional bias [channels]."""
        below = self.under(name)
        return ShortConv(below.take("weight", channels, 1, kernel_size), below.take("bias", channels) if bias else None)

    def experts(self, name: str, count: int, out: int, into: int, bias: bool = False) -> ExpertLinear:
        """The linear layers `0.name` … of `count` experts: a weight [out, into] each, and `name`.bias [count, out]."""
        weights = tuple(self.under(i).under(name).matrix("weight", out, into) for i in range(count))
        return ExpertLinear(weights, self.under(name).take("bias", count, out) if bias else None)

    def latent(self, name: str, num_heads: int, key_dim: int, value_dim: int, rank: int) -> LatentLinear:
        """The linear layer `name` from latents to keys and values: weight [H (K + V), R]."""
        weight = self.under(name).take("weight", num_heads * (key_dim + value_dim), rank)
        return LatentLinear(weight, num_heads, key_dim, value_dim)

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        """The table `name`: weight [rows, width]."""
        return Embedding(self.under(name).matrix("weight", rows, width))


@runtime_checkable
class Architecture(Protocol):
    """A frozen dataclass that is the forward of its models (`onward.models.model`).

    cached: the cache shape of each attention layer; one with recurrent layers has the `states` of each, too.
    float_tensor: name and shape of a tensor that is never quantized. max_position_embeddings: the trained context.
    serves_longer_texts: whether RoPE extends it.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def serves_longer_texts(self) -> bool: ...

    @property
    def tie_word_embeddings(self) -> bool: ...

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def cached(self) -> Sequence[LayerShape]: ...

    @property
    def float_tensor(self) -> tuple[str, tuple[int, ...]]: ...

    def serving(self, max_seq_len: int) -> "Architecture":
        """The same architecture for up to `max_seq_len` positions."""
        ...

    def read(self, scope: WeightScope, each_layer: Callable[[Any], Any] = ...) -> Any:
        """Read all weights from a checkpoint; each_layer converts each item of the params' `layers`."""
        ...

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, params: Params, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]: ...


@runtime_checkable
class PartOfCheckpoint(Protocol):
    """An architecture whose checkpoints have other tensors too. unread: the prefixes of their names."""

    @property
    def unread(self) -> tuple[str, ...]: ...


def is_unread(architecture: Architecture, name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to another part than the model."""
    return isinstance(architecture, PartOfCheckpoint) and name.startswith(architecture.unread)


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that `read` takes, by name; allocates no memory."""
    shapes: dict[str, tuple[int, ...]] = {}

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    architecture.read(WeightScope(_Tensors(take)))
    return shapes


def num_parameters(architecture: Architecture) -> int:
    """The number of parameters; a tied head counts once."""
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(architecture).values())


def cache_plan(
    architecture: Architecture, dtype: torch.dtype, device: torch.device | str = "cpu", format: KVFormat | None = None
) -> CachePlan:
    """The caches of this architecture. format: of keys and values; floats of the dtype by default."""
    return CachePlan(tuple(architecture.cached), dtype, device, tuple(getattr(architecture, "states", ())), format)


def build_model(
    architecture: Architecture, params: Any, max_seq_len: int | None = None, cache_format: KVFormat | None = None
) -> Model:
    """A `Model` of this architecture with `params`, stock or packed, on their device and in their dtype.

    cache_format: of its KV caches (`cache_plan`).
    """
    dtype, device = params.embed_tokens.weight.dtype, params.embed_tokens.weight.device
    max_seq_len = max_seq_len or architecture.max_position_embeddings
    architecture = architecture.serving(max_seq_len)
    plan = cache_plan(architecture, dtype, device, cache_format).up_to(max_seq_len)
    return Model(
        forward=partial(architecture),  # a new object: programs are cached by forward
        params=params,
        new_cache=partial(KVCache.of, plan),
        vocab_size=architecture.vocab_size,
        max_seq_len=max_seq_len,
        device=device,
        num_parameters=num_parameters(architecture),
        new_blocks=partial(KVPool, plan),
    )


def build_trainable_model(
    architecture: Architecture, parameters: Mapping[str, Tensor], dtype: torch.dtype, max_seq_len: int | None = None
) -> Model:
    """A `Model` that computes in `dtype` with the current values of parameters, which are given by stock name.

    Raises:
        RequestError: the architecture has recurrent layers.
    """
    if getattr(architecture, "states", ()):
        raise RequestError(
            "trainable= needs a family without recurrent layers: a recurrence overwrites its state token by token, so "
            "it has no gradient (docs/exact-training.md)"
        )
    copies = _Tensors(lambda name, shape, own: parameters[name].detach().to(own or dtype, copy=True))
    params = pack_params(architecture.read(WeightScope(copies), pack_layer))
    stock = architecture.read(WeightScope(_Tensors(lambda name, shape, dtype: parameters[name])))
    model = build_model(architecture, params, max_seq_len)
    return replace(model, trainable=TrainableWeights(dict(parameters), stock, params))


def architecture_of(model: Model) -> Architecture | None:
    """The architecture of a `build_model` model; None for other forwards."""
    forward = model.forward.func if isinstance(model.forward, partial) else model.forward
    return forward if isinstance(forward, Architecture) else None


def head_of(model: Model) -> tuple[Any, Any]:
    """The architecture with the final norm and the head of a model, and its params; (None, params) for a forward that
    is of no built-in family. Of a model over several processes, it has the layers of this process alone."""
    if isinstance(model.forward, DividedForward):
        return model.forward.own_part(model.params)
    return architecture_of(model), model.params


def named_params(architecture: Architecture) -> Any:
    """The params of this architecture, with the stock name of each tensor in its place."""
    return architecture.read(WeightScope(_Tensors(lambda name, shape, dtype: name)))


def weight_dtypes(architecture: Architecture) -> dict[str, torch.dtype | None]:
    """The dtype of each weight that has one of its own whatever the model's, by name; None for the others."""
    found: dict[str, torch.dtype | None] = {}
    architecture.read(WeightScope(_Tensors(lambda name, shape, dtype: found.setdefault(name, dtype))))
    return found


class _Tensors:
    """`Tensors` by a function of name, shape and dtype, which may make anything else in their place."""

    def __init__(self, make: Callable[[str, tuple[int, ...], torch.dtype | None], Any]) -> None:
        self._make = make

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        return self._make(name, shape, dtype)
