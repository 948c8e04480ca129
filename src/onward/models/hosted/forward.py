"""The forward of a module of transformers over Onward's caches, as the contract of `onward.models.model` wants it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import KVCache, PagedKVCache
from onward.forks import renew_in_forks
from onward.models.hosted.cache import new_cache_of
from onward.models.hosted.library import NotHostedError
from onward.models.hosted.linears import Hosted
from onward.models.hosted.step import HostedLayer, Step, Survey, a_step
from onward.models.linear import Embedding, Linear


class HostedParams(NamedTuple):
    """The weights of a hosted module.

    layers: its linear layers, in order. outer: the head and what it is tied to, by name. tensors: all other parameters
    and buffers by name.
    """

    layers: tuple[Linear, ...]
    outer: dict[str, Linear | Embedding]
    tensors: dict[str, Tensor]


class HostedForward:
    """(tokens int32 [B, T], offsets int32 [B], cache, params, logits_at int64 [R, N] or None) -> (logits, cache).

    The module holds no weights of its own: each call gives it those of `params`.
    """

    def __init__(
        self, module: Any, parts: dict[str, Hosted], outer: set[str], first_position: int, max_seq_len: int | None
    ) -> None:
        """parts: the linear layers and tables that were replaced, by name. outer: the names of those in
        `HostedParams.outer`. first_position: as in `CausalLM`."""
        self._module = module
        self._inner = [name for name in parts if name not in outer]
        self._parts = parts
        self._tensors = _places_of_tensors(module)
        self._first_position = first_position
        self._max_seq_len = max_seq_len
        self._num_layers: int = module.config.get_text_config().num_hidden_layers
        self._outer = outer
        self.places: dict[int, int] = {}
        self.layers: list[HostedLayer] = []
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child: the lock may be held by a thread that is not there, half way through binding weights."""
        self._lock = threading.RLock()
        self._bound: HostedParams | None = None

    def params(self) -> HostedParams:
        """The weights that the module holds now."""
        return HostedParams(
            tuple(self._parts[name].part for name in self._inner),  # type: ignore[misc]
            {name: self._parts[name].part for name in sorted(self._outer)},
            {name: owner[key].detach() for name, (owner, key) in self._tensors.items()},
        )

    def survey(self, device: torch.device) -> Survey:
        """Call the module for two tokens, to see what it caches and how it attends; nothing is computed of keys.

        Raises:
            NotHostedError: it attends in a way that Onward's caches do not serve.
        """
        found = Survey()
        offsets = torch.zeros(1, dtype=torch.int32, device=device)
        step = Step(offsets, None, {}, [], survey=found)
        with torch.no_grad(), self._lock:
            self._call(torch.zeros(1, 2, dtype=torch.int32, device=device), step)
        if step.unread:
            raise NotHostedError("its attention is not called through transformers' AttentionInterface")
        self.layers = found.layers
        self.places = {layer: place for place, layer in enumerate(sorted(found.cached))}
        return found

    def __call__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        cache: KVCache | PagedKVCache,
        params: HostedParams,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | PagedKVCache]:
        step = Step(offsets, cache, self.places, self.layers, logits_at)
        with torch.no_grad(), self._lock, self._with(params):
            return self._call(tokens, step), cache

    def _call(self, tokens: Tensor, step: Step) -> Tensor:
        first = self._first_position
        columns = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        positions = step.offsets.long().unsqueeze(1) + columns
        if self._max_seq_len is not None:
            # Padding behind a row's last token may reach past the context; nobody reads its logits.
            positions = positions.clamp(max=first + self._max_seq_len - 1)
        with a_step(step):
            output = self._module(
                input_ids=tokens.long(),
                position_ids=positions,
                past_key_values=new_cache_of(step, self._num_layers),
                use_cache=True,
            )
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def _with(self, params: HostedParams) -> Iterator[None]:
        """Within the block the module has these weights; then again those that it was bound to before."""
        before = self._bound
        if params is not before:
            self.bind(params)
        try:
            yield
        finally:
            if before is not None and params is not before:
                self.bind(before)

    def bind(self, params: HostedParams) -> None:
        """Give the module these weights."""
        for name, part in zip(self._inner, params.layers, strict=True):
            self._parts[name].part = part
        for name, outer_part in params.outer.items():
            self._parts[name].part = outer_part
        for name, (owner, key) in self._tensors.items():
            owner[key] = params.tensors[name]
        self._bound = params


def _places_of_tensors(module: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each parameter and buffer is held: the dict of its module, and its key there."""
    places: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, part in module.named_modules():
        for owner in (part._parameters, part._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    places[f"{prefix}.{key}" if prefix else key] = owner, key
    return places
