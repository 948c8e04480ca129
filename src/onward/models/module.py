"""A torch module as a forward, in eval mode and without gradients, with its own tensors or replacements; and a causal
language model of transformers, whose layers have taps while somebody asks for them."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache as once
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onward import ops
from onward.cache import CachePlan, KVCache, LayerShape
from onward.errors import RequestError, one_line
from onward.models.contract import NORM, logits_and_cache, take_positions, takes_logits_at
from onward.ops.tap import is_active, tap

# (module, tokens, offsets, cache) -> (logits, cache): adapts a module with another signature.
ModuleCall = Callable[..., tuple[Tensor, Any]]


class ModuleForward:
    """The forward of a module: (tokens, offsets, cache, params) -> (logits, cache).

    params: the module's parameters and buffers by name. A call with this very dict looks them up again, so that it sees
    replaced tensors (an assigned buffer, a parameter loaded with assign=True). A call with another dict of the same
    names (averaged weights, say) uses that dict's tensors.
    """

    def __init__(self, module: nn.Module, call: ModuleCall | None, vocab_size: int) -> None:
        self.params = _tensors_of(module)
        self.call = call
        self._module = module
        self._callee = _ModuleWithCall(module, call)
        self._vocab_size = vocab_size
        self._selects = takes_logits_at(module if call is None else call)

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: dict[str, Tensor], *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """`logits_at` is passed to a module that takes it, unless it is None."""
        replacements: dict[str, Tensor] = {}
        if params is self.params:
            self.look_up()
        else:
            if unpaired := sorted(params.keys() ^ self.params.keys()):
                raise RequestError(
                    "params must have the names of the module's own parameters and buffers; "
                    f"{unpaired[0]!r} is in one only"
                )
            replacements = {f"module.{name}": tensor for name, tensor in params.items()}
        device = next((tensor.device for tensor in params.values()), tokens.device)
        if device != tokens.device:
            raise RequestError(
                f"the module is on {device}, but its Model was made for {tokens.device}: make the Model again after "
                "moving the module"
            )
        keywords = {"logits_at": logits_at} if logits_at is not None and self._selects else {}
        inputs = (tokens, offsets, cache)
        with torch.no_grad(), eval_mode(self._module):
            result = (
                functional_call(self._callee, replacements, inputs, keywords)
                if replacements
                else self._callee(*inputs, **keywords)
            )
        logits, cache = self._checked(result, keywords.get("logits_at", tokens))
        return (logits if logits_at is None or keywords else take_positions(logits, logits_at)), cache

    def look_up(self) -> dict[str, Tensor]:
        """Update `params` to the module's current tensors, and return it."""
        # Updated only if tensors changed, and never emptied: other threads read it concurrently.
        now = _tensors_of(self._module)
        if now.keys() != self.params.keys() or any(now[name] is not self.params[name] for name in now):
            for name in self.params.keys() - now.keys():
                del self.params[name]
            self.params.update(now)
        return self.params

    def _checked(self, result: object, positions: Tensor) -> tuple[Tensor, Any]:
        advice = ": adapt it with call=lambda module, tokens, offsets, cache: (…, cache)"
        logits, cache = logits_and_cache(result, "the module", advice)
        expected_shape = [*positions.shape, self._vocab_size]
        if list(logits.shape) != expected_shape or not logits.is_floating_point():
            raise RequestError(
                f"the module must return float logits [B, T, V] {expected_shape}; got {logits.dtype} "
                f"{list(logits.shape)}"
            )
        return logits, cache


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode within the block, and restore each mode afterwards, also after an error. Only
    the `training` flags are set: a module's own `train` and `eval`, which may do more, are not called."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class _ModuleWithCall(nn.Module):
    """A module whose forward is `call`, for `functional_call`, which accepts only modules."""

    def __init__(self, module: nn.Module, call: ModuleCall | None) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, tokens: Tensor, offsets: Tensor, cache: Any, **keywords: Tensor) -> Any:
        if self._call is None:
            return self.module(tokens, offsets, cache, **keywords)
        return self._call(self.module, tokens, offsets, cache, **keywords)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. A tied tensor has only its first name; functional_call replaces it everywhere."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_causal_lm(module: nn.Module) -> bool:
    """Whether it is a transformers model, which `from_module` can call without `call=`."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


@dataclass(frozen=True)
class CausalLM:
    """Calls a causal language model of transformers (a `ModuleCall`), and creates its cache.

    plan: of its caches, found by processing one token. inputs: the argument names of its forward. first_position: the
    module's position id of a text's first token. max_seq_len: None if its config has none.
    """

    plan: CachePlan
    inputs: frozenset[str]
    first_position: int
    vocab_size: int
    max_seq_len: int | None

    @classmethod
    def of(cls, module: Any) -> "CausalLM":
        """Process one token, to see what the module caches.

        Raises:
            RequestError: the module is not a decoder with a head, or caches more than keys and values.
        """
        name = type(module).__name__
        inputs = frozenset(inspect.signature(module.forward).parameters)
        if getattr(module.config, "is_encoder_decoder", False):
            raise RequestError(f"{name} is an encoder-decoder; Onward supports only decoder-only models")
        if not {"input_ids", "past_key_values"} <= inputs:
            raise _unsupported(name, "it takes no past_key_values")
        config = module.config.get_text_config()
        if other := sorted(
            kind
            for kind in set(getattr(config, "layer_types", None) or ())
            if not kind.endswith("attention") or kind.startswith("linear")
        ):
            raise _unsupported(name, f"layers of the type {', '.join(other)} keep a recurrent state")
        if not all(getattr(part, "is_causal", True) for part in module.modules()):
            raise _unsupported(name, "its attention is not causal; BERT and similar models need is_decoder=True")
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        past = sys.modules["transformers.cache_utils"].DynamicCache()
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        try:
            with torch.no_grad(), eval_mode(module):
                output = module(input_ids=token, past_key_values=past, use_cache=True)
        except Exception as error:
            raise _unsupported(name, f"{type(error).__name__}: {one_line(error)}") from error
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise RequestError(
                f"{name} has no head that returns logits [B, T, V]: load it as AutoModelForCausalLM, or pass call= and "
                "new_cache="
            )
        layers = [layer for layer in past.layers if isinstance(layer.keys, Tensor) and layer.keys.dim() == 4]
        # The last layers of some models share keys and values of earlier ones.
        expected = getattr(config, "num_hidden_layers", 0) - (getattr(config, "num_kv_shared_layers", None) or 0)
        expected = max(expected, len(past.layers))
        if not layers or len(layers) < expected:
            raise _unsupported(name, f"{len(layers)} of {expected} layers cached keys and values")
        limit = getattr(config, "max_position_embeddings", None)
        shapes = tuple(LayerShape(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in layers)
        first = _first_position(module, logits.shape[-1]) if "position_ids" in inputs else 0
        max_seq_len = limit - first if isinstance(limit, int) and limit > 0 else None
        plan = CachePlan(shapes, layers[0].keys.dtype, device)
        return cls(plan, inputs, first, logits.shape[-1], max_seq_len)

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """Create an empty cache in the shapes and dtypes of the module's layers."""
        return KVCache.of(self.plan, batch, max_len)

    def __call__(
        self, module: Any, tokens: Tensor, offsets: Tensor, cache: KVCache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """A forward of the contract in `onward.models.model`."""
        rows = LeftPadded.of(offsets, tokens.shape[1])
        past = transformers_cache(_Layer, [(cache, index, offsets, rows) for index in range(len(cache.keys))])
        inputs: dict[str, Any] = {"input_ids": tokens.long(), "past_key_values": past, "use_cache": True}
        positions = offsets.long().unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        if self.max_seq_len is not None:
            # Padding after a row's last token may exceed the context; its logits are never read.
            positions = positions.clamp(max=self.max_seq_len - 1)
        optional: dict[str, Any] = {"attention_mask": rows.mask, "position_ids": positions + self.first_position}
        indices = logits_at
        if logits_at is not None and "logits_to_keep" in self.inputs:
            # The module takes the same positions for all rows: the union of all rows' positions.
            optional["logits_to_keep"], indices = torch.unique(logits_at, return_inverse=True)
        inputs |= {name: value for name, value in optional.items() if name in self.inputs}
        with module_taps(module):
            logits: Tensor = module(**inputs).logits
        return (logits if indices is None else take_positions(logits, indices)), cache


@dataclass(frozen=True)
class LeftPadded:
    """Rows of different offsets, aligned at their last columns.

    offset: columns before the new tokens. length: the number of columns. mask: int64 [B, length], 0 in padding.
    positions: int64 [B, length], the position in each column (0 in padding); None if column i is position i in every
    row.
    """

    offset: int
    length: int
    mask: Tensor
    positions: Tensor | None

    @classmethod
    def of(cls, offsets: Tensor, new: int) -> "LeftPadded":
        """offsets: int [B]. new: the number of new tokens in each row."""
        starts = offsets.tolist()
        offset = max(starts)
        columns = torch.arange(offset + new, device=offsets.device) - (offset - offsets.long()).unsqueeze(1)
        positions = None if min(starts) == offset else columns.clamp(min=0)
        return cls(offset, offset + new, (columns >= 0).long(), positions)

    def columns(self, layer: Tensor) -> Tensor:
        """[B, G, S, D] of a cache -> [B, G, length, D]; a view where all offsets are equal."""
        if self.positions is None:
            return layer[:, :, : self.length]
        index = self.positions[:, None, :, None].expand(-1, layer.shape[1], -1, layer.shape[3])
        return layer.gather(2, index)


def transformers_cache(layer: type, arguments: Iterable[tuple[Any, ...]]) -> Any:
    """A `transformers.Cache` for one forward, of a layer for each tuple of arguments."""
    library = sys.modules["transformers.cache_utils"]
    return library.Cache(layers=[_layer_class(layer)(*each) for each in arguments])


@once
def _layer_class(layer: type) -> Any:
    return type(f"Onward{layer.__name__}", (layer, sys.modules["transformers.cache_utils"].DynamicLayer), {})


class CacheLayer:
    """A layer of transformers' cache over Onward's memory; `transformers_cache` adds transformers' base class."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: the memory exists already."""


class _Layer(CacheLayer):
    """A layer that writes to a `KVCache`."""

    def __init__(self, cache: KVCache, index: int, offsets: Tensor, rows: LeftPadded) -> None:
        super().__init__()
        self._cache, self._index, self._offsets, self._rows = cache, index, offsets, rows
        self._length = rows.offset

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, and return those of all columns."""
        buffers = self._cache.keys[self._index], self._cache.values[self._index]
        for new, buffer in zip((key_states, value_states), buffers, strict=True):
            ops.write_cache(buffer, _as_cached(new, buffer), self._offsets)
        self._length = self._rows.length
        self.keys, self.values = (self._rows.columns(buffer).to(key_states.dtype) for buffer in buffers)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        return self._length

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """The number of columns that attention sees, and the index of the first."""
        return self._rows.length, 0


@torch.no_grad()
def _first_position(module: Any, vocab_size: int) -> int:
    """The module's default position id of a text's first token: RoBERTa and similar models count from after the
    padding id.

    Raises:
        RequestError: it numbers positions differently.
    """
    padding = getattr(module.config.get_text_config(), "pad_token_id", None)
    padding = padding if isinstance(padding, int) else -1
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    tokens = torch.tensor([[token for token in range(min(vocab_size, 4)) if token != padding]], device=device)
    with eval_mode(module):
        expected = module(input_ids=tokens).logits
        if not bool(expected.isfinite().all()):
            return 0  # broken weights show nothing here; decoding reports them
        # Wrong positions change logits by much more than half of a dtype's digits.
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
        for first in (0, padding + 1):
            positions = first + torch.arange(tokens.shape[1], device=device).unsqueeze(0)
            logits = module(input_ids=tokens, position_ids=positions).logits
            if float((logits - expected).abs().max()) <= tolerance:
                return first
    raise _unsupported(type(module).__name__, "it numbers positions neither from 0 nor from after its padding")


def _as_cached(new: Tensor, buffer: Tensor) -> Tensor:
    if torch.promote_types(new.dtype, buffer.dtype) != buffer.dtype:
        raise RequestError(
            f"the module's keys and values are {new.dtype}, but its cache was made for {buffer.dtype}: make the Model "
            "again after changing the module's dtype"
        )
    return new.to(buffer.dtype)


def _unsupported(name: str, why: str) -> RequestError:
    return RequestError(
        f"{name} cannot be decoded as it is ({why}): Onward needs a decoder that caches only keys and values, so that "
        "tokens can be taken back; for another module pass call= and new_cache="
    )


# ── taps ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def module_taps(module: Any) -> Iterator[None]:
    """Give the forwards within the block the taps of a family: "embedding", "layers.N" and "norm".

    "embedding" is the first layer's input, and "norm" is what the decoder returns for the head. A module without a
    list of its layers has no taps.
    """
    decoder, layers = _decoder_and_layers(module) if is_active() else (None, ())
    with ExitStack() as hooks:
        if decoder is not None:
            hooks.callback(next(iter(layers)).register_forward_pre_hook(_tap_input, with_kwargs=True).remove)
            for number, layer in enumerate(layers):
                hooks.callback(layer.register_forward_hook(_Output(f"layers.{number}")).remove)
            hooks.callback(decoder.register_forward_hook(_Output(NORM)).remove)
        yield


def _decoder_and_layers(module: Any) -> tuple[nn.Module | None, Iterable[nn.Module]]:
    """The submodule that has a list of all layers, and the list."""
    count = module.config.get_text_config().num_hidden_layers
    for part in module.modules():
        for child in part.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return part, child
    return None, ()


def _tap_input(_: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs:
        return (tap(inputs[0], "embedding"), *inputs[1:]), keywords
    return inputs, {**keywords, "hidden_states": tap(keywords["hidden_states"], "embedding")}


class _Output:
    """A hook that taps a module's result: a tensor, or the first item of a tuple or of an output object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return tap(output, self._name)
        if isinstance(output, tuple):
            return (tap(output[0], self._name), *output[1:])
        output.last_hidden_state = tap(output.last_hidden_state, self._name)
        return output
