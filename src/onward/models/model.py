"""The one contract. Everything above this floor knows a model only as what stands here.

    forward(tokens, offsets, cache, params) -> (logits, cache)
        tokens   int32 [B, T]   the ids to process
        offsets  int32 [B]      absolute position of tokens[:, 0] in each row
        cache    any pytree of fixed-shape tensors; updated in place and returned
        params   any pytree of tensors: the weights, an argument and never a closure
        logits   float [B, T, V]

A forward is shape-stable: no shape depends on the VALUE of `offsets`. Entries of the cache at or past a
row's offset are never read.

The head is the dearest matrix of a small model and a prompt needs it at one position only, so a forward may
also take `logits_at`, int64 [B, N] indices into T, and return logits [B, N, V] of those positions alone.
It says so with `Model(selects_logits=True)`; a plain four-argument function is served by picking its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onward.errors import RequestError
from onward.models.causal_lm import CausalLM, is_causal_lm
from onward.models.contract import check_logits, logits_and_cache, take_positions
from onward.models.module import ModuleCall, ModuleForward
from onward.reprs import described, in_bytes
from onward.sampling.params import check_whole

CPU = torch.device("cpu")

Cache = Any
Params = Any
Forward = Callable[..., tuple[Tensor, Cache]]


class NewCache(Protocol):
    """Makes an empty cache for `batch` rows of `max_len` positions."""

    def __call__(self, batch: int, max_len: int) -> Cache: ...


@dataclass(frozen=True, repr=False)
class Model:
    """A forward, its weights and how to make its cache.

    vocab_size: V. max_seq_len: the most positions it can serve, None where it does not say.
    selects_logits: whether forward takes the keyword `logits_at`.
    device: where its tokens and offsets go.
    num_parameters: weights, a tied one counted once; None where nobody counted.
    compiles: whether its forward may become a program (`onward.compile`), which reads params where they lay when it
        was traced: changes in place are seen, other tensors in their place are not.
    """

    forward: Forward
    params: Params
    new_cache: NewCache
    vocab_size: int
    max_seq_len: int | None = None
    selects_logits: bool = False
    device: torch.device = CPU
    num_parameters: int | None = None
    compiles: bool = True

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Run the forward; logits [B, T, V], or [B, N, V] at `logits_at` int64 [B, N]."""
        if self.selects_logits:
            return logits_and_cache(self.forward(tokens, offsets, cache, self.params, logits_at=logits_at))
        return run_plain(self.forward, self.params, tokens, offsets, cache, logits_at)

    @staticmethod
    def from_module(
        module: nn.Module,
        *,
        new_cache: NewCache | None = None,
        vocab_size: int | None = None,
        max_seq_len: int | None = None,
        call: ModuleCall | None = None,
        selects_logits: bool = False,
    ) -> "Model":
        """A `torch.nn.Module` with a cache argument as a Model.

        The module is called as `module(tokens, offsets, cache) -> (logits, cache)`, shapes and rules as above. Its
        weights are not copied: what a training step changes, the next decode sees. Each forward runs without
        gradients and with every submodule in eval mode; afterwards each has its former mode again, also when an
        error is raised. (The flags `training` are set; a `train` or `eval` of the module's own is not called.)

        A causal language model of transformers is taken as it is: it keeps its own forward and attention, over an
        `onward.KVCache`. One token is processed here, to see what it caches.

        Args:
            module: on the device that it is to run on.
            new_cache: (batch, max_len) -> an empty cache; the module's own `new_cache` by default.
            vocab_size: V of the logits; the module's own `vocab_size` by default.
            max_seq_len: the most positions it serves; the module's own `max_seq_len`, if any, by default.
            call: (module, tokens, offsets, cache) -> (logits, cache), for a module of another signature.
            selects_logits: whether the module, or `call`, takes the keyword `logits_at`.

        Raises:
            RequestError: no module, or neither given nor found in it what is needed; a model of transformers that is no
                decoder with keys and values alone. Each forward raises it for what is no (logits, cache), or logits
                of another shape.
        """
        if not isinstance(module, nn.Module):
            raise RequestError(f"from_module takes a torch.nn.Module; got {type(module).__name__}")
        if new_cache is None and call is None and is_causal_lm(module) and not hasattr(module, "new_cache"):
            causal_lm = CausalLM.of(module)
            call, new_cache, selects_logits = causal_lm, causal_lm.new_cache, True
            vocab_size = causal_lm.vocab_size if vocab_size is None else vocab_size
            max_seq_len = causal_lm.max_seq_len if max_seq_len is None else max_seq_len
        new_cache = _asked(module, "new_cache", new_cache)
        vocab_size = _asked(module, "vocab_size", vocab_size)
        max_seq_len = getattr(module, "max_seq_len", None) if max_seq_len is None else max_seq_len
        if not callable(new_cache):
            raise RequestError(f"new_cache must be a function (batch, max_len) -> cache; got {new_cache!r}")
        check_whole("vocab_size", vocab_size, low=1)
        if max_seq_len is not None:
            check_whole("max_seq_len", max_seq_len, low=1)
        forward = ModuleForward(module, call, vocab_size)
        return Model(
            forward=forward,
            params=forward.params,
            new_cache=new_cache,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            selects_logits=selects_logits,
            device=next((tensor.device for tensor in forward.params.values()), CPU),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            # Whoever trains may give the module other tensors at any time.
            compiles=False,
        )

    def __repr__(self) -> str:
        return described(self, *self.facts())

    def facts(self) -> list[str]:
        """What a repr says of it."""
        counted = "" if self.num_parameters is None else f"{self.num_parameters:,} parameters"
        context = "" if self.max_seq_len is None else f"context {self.max_seq_len:,}"
        vocabulary = f"vocabulary {self.vocab_size:,}"
        return [counted, in_bytes(self.nbytes), vocabulary, context, f"on {self.device}"]

    @property
    def nbytes(self) -> int:
        """Bytes of weights held in memory or mapped, each tensor once."""
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(self.params) if isinstance(leaf, Tensor)}
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())


def _asked(module: nn.Module, name: str, given: Any) -> Any:
    """What was given, or else the module's own attribute of that name."""
    found = getattr(module, name, None) if given is None else given
    if found is None:
        raise RequestError(f"from_module needs {name}, and this {type(module).__name__} has no such attribute: give it")
    return found


def run_plain(
    forward: Forward, params: Params, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Call a four-argument forward and pick the logits asked for out of all of them."""
    logits, cache = logits_and_cache(forward(tokens, offsets, cache, params))
    if logits_at is None:
        return logits, cache
    check_logits(logits, tokens.shape)
    return take_positions(logits, logits_at), cache
