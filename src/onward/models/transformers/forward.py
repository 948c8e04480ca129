"""A transformers module as a forward over Onward's KV cache (the contract of `onward.models.model`)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import LayerShape
from onward.models.blocks.layer import LayerCache
from onward.models.linear import Embedding, Linear
from onward.models.module import CacheLayer, module_taps, transformers_cache
from onward.models.transformers.linears import CacheSurvey, Hosted, Step, UnsupportedModuleError, current_step, running
from onward.util.process import renew_in_forks


class _Layer(CacheLayer):
    """A layer that reports an empty cache. A module asks for its length only where it gets no positions; masks are
    Onward's."""

    def __init__(self, step: Step, index: int) -> None:
        super().__init__()
        self._step, self._index = step, index

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Record new keys and values [B, G, T, D], and return them."""
        survey = self._step.survey
        if survey is not None:
            survey.dtypes |= {key_states.dtype, value_states.dtype}
            survey.cached[self._index] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        self._step.states[id(key_states)] = self._index, (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0


# The longest window to look for if no field names it.
_MAX_UNNAMED_WINDOW = 64


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Store new keys and values [B, G, T, D] in the cache, and attend over it; [B, T, H, D]."""
    step = current_step()
    layer, new = step.layer_of(key, value)
    if step.survey is not None:
        _survey(step, layer, module, attention_mask, keywords)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    cache = step.cache
    assert cache is not None
    window = step.windows[step.calls]
    step.calls += 1
    # None: keys and values of another layer, which has stored them already.
    out = cache.attend(
        step.places[layer], query, key if new else None, value if new else None, step.offsets,
        window=window, scale=scaling, sinks=s_aux, softcap=softcap,
    )  # fmt: skip
    return out.transpose(1, 2), None


def mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Tensor | None:
    """No mask, since `attend` knows the window. During a survey, a placeholder for the window."""
    step = current_step()
    if step.survey is None:
        return None
    placeholder = torch.zeros(1, 1, 1, 1)
    step.survey.masks[id(placeholder)] = placeholder, _window(mask_function, local_size)
    return placeholder


def _survey(step: Step, layer: int, module: Any, attention_mask: Tensor | None, keywords: dict[str, Any]) -> None:
    survey = step.survey
    assert survey is not None
    if not keywords.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModuleError("its attention is not causal")
    mask_of = None if attention_mask is None else survey.masks.get(id(attention_mask))
    if attention_mask is not None and mask_of is None:
        raise UnsupportedModuleError("it makes its own attention mask")
    unknown = [name for name, value in keywords.items() if isinstance(value, Tensor) and name not in _IGNORED_TENSORS]
    if unknown:
        raise UnsupportedModuleError(f"its attention takes {', '.join(sorted(unknown))}")
    window = keywords.get("sliding_window") if mask_of is None else mask_of[1]
    survey.windows.append(window)
    survey.windows_of.setdefault(layer, set()).add(window)


# Tensors that modules pass to every function below them, and that attention does not read.
_IGNORED_TENSORS = frozenset({"position_ids", "cache_position", "input_ids"})


def _window(mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """The window of a mask, compared with the causal mask of that window; None: full attention."""
    length = 2 * (local_size or _MAX_UNNAMED_WINDOW) + 3
    queries = sorted({at for edge in (0, length // 2, length) for at in range(edge - 3, edge + 3) if 0 <= at < length})
    query, key = torch.tensor(queries).unsqueeze(1), torch.arange(length).unsqueeze(0)
    seen = torch.as_tensor(mask_function(0, 0, query, key)).expand(len(queries), length)
    window = int(seen[-1].sum())
    if not torch.equal(seen, (key <= query) & (key > query - window)):
        raise UnsupportedModuleError("its masks are neither causal nor those of a sliding window")
    return None if window == length else window


class TransformersParams(NamedTuple):
    """The weights of a hosted module. layers: its linear layers, in order. outer: the head and its tied embedding, by
    name. tensors: all other parameters and buffers by name."""

    layers: tuple[Linear, ...]
    outer: dict[str, Linear | Embedding]
    tensors: dict[str, Tensor]


class TransformersForward:
    """(tokens int32 [B, T], offsets int32 [B], cache, params, logits_at int64 [R, N] or None) -> (logits, cache). The
    module has no weights of its own: each call binds those of `params`."""

    def __init__(
        self, module: Any, parts: dict[str, Hosted], outer: set[str], first_position: int, max_seq_len: int | None
    ) -> None:
        """parts: the replaced linear layers and tables, by name. outer: the names of those in
        `TransformersParams.outer`. first_position: as in `CausalLM`."""
        self._module = module
        self._inner = [name for name in parts if name not in outer]
        self._parts = parts
        self._tensors = _places_of_tensors(module)
        self._first_position = first_position
        self._max_seq_len = max_seq_len
        self._num_layers: int = module.config.get_text_config().num_hidden_layers
        self._outer = outer
        self.places: dict[int, int] = {}
        self.windows: list[int | None] = []
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child: create a new lock, since another thread may have held the old one while binding."""
        self._lock = threading.RLock()
        self._bound: TransformersParams | None = None

    def params(self) -> TransformersParams:
        """The module's current weights."""
        return TransformersParams(
            tuple(self._parts[name].part for name in self._inner),  # type: ignore[misc]
            {name: self._parts[name].part for name in sorted(self._outer)},
            {name: owner[key].detach() for name, (owner, key) in self._tensors.items()},
        )

    def survey(self, device: torch.device) -> CacheSurvey:
        """Call the module for two tokens, to see what it caches and how it attends; attention is not computed.

        Raises:
            UnsupportedModuleError: its attention cannot run over Onward's KV cache.
        """
        found = CacheSurvey()
        offsets = torch.zeros(1, dtype=torch.int32, device=device)
        step = Step(offsets, None, {}, [], survey=found)
        with torch.no_grad(), self._lock:
            self._call(torch.zeros(1, 2, dtype=torch.int32, device=device), step)
        if step.unread:
            raise UnsupportedModuleError("its attention is not called through transformers' AttentionInterface")
        self.windows = found.windows
        self.places = {layer: place for place, layer in enumerate(sorted(found.cached))}
        return found

    def __call__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        cache: LayerCache,
        params: TransformersParams,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, LayerCache]:
        step = Step(offsets, cache, self.places, self.windows, logits_at)
        with torch.no_grad(), self._lock, self._with(params):
            return self._call(tokens, step), cache

    def _call(self, tokens: Tensor, step: Step) -> Tensor:
        first = self._first_position
        columns = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        positions = step.offsets.long().unsqueeze(1) + columns
        if self._max_seq_len is not None:
            # Padding after a row's last token may exceed the context; its logits are never read.
            positions = positions.clamp(max=first + self._max_seq_len - 1)
        past = transformers_cache(_Layer, [(step, index) for index in range(self._num_layers)])
        with running(step), module_taps(self._module):
            output = self._module(input_ids=tokens.long(), position_ids=positions, past_key_values=past, use_cache=True)
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def _with(self, params: TransformersParams) -> Iterator[None]:
        """Bind these weights within the block, then the earlier ones."""
        before = self._bound
        if params is not before:
            self.bind(params)
        try:
            yield
        finally:
            if before is not None and params is not before:
                self.bind(before)

    def bind(self, params: TransformersParams) -> None:
        """Set the module's weights."""
        for name, part in zip(self._inner, params.layers, strict=True):
            self._parts[name].part = part
        for name, outer_part in params.outer.items():
            self._parts[name].part = outer_part
        for name, (owner, key) in self._tensors.items():
            owner[key] = params.tensors[name]
        self._bound = params


def _places_of_tensors(module: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """The location of each parameter and buffer: its module's dict, and its key there."""
    places: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, part in module.named_modules():
        for owner in (part._parameters, part._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    places[f"{prefix}.{key}" if prefix else key] = owner, key
    return places
