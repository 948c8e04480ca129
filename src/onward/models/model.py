"""The contract between a model and everything that decodes with it.

    forward(tokens, offsets, cache, params) -> (logits, cache)
        tokens   int32 [B, T]   the ids to process
        offsets  int32 [B]      absolute position of tokens[:, 0] in each row
        cache    any pytree of fixed-shape tensors; updated in place and returned
        params   any pytree of tensors: the weights, passed as an argument and never captured
        logits   float [B, T, V]

A forward is shape-stable: no shape depends on the VALUE of `offsets`. Cache entries at or past a row's offset are never
read.

The head is the largest matrix of a small model, and a prompt needs logits at one position only. So a forward may also
take `logits_at`, int64 [R, N] indices into T, and return logits [R, N, V] of those positions of the first R rows; R is
B unless the cache has blocks. A forward without a parameter of that name computes all logits, and Onward selects.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from onward import ops
from onward.cache import KVPool
from onward.errors import RequestError
from onward.models.contract import SelectingForward, logits_and_cache, takes_logits_at
from onward.models.live_weights import TrainableWeights, WeightsLock
from onward.models.module import CausalLM, ModuleCall, ModuleForward, is_causal_lm
from onward.ops.operator import autocast_dtype_on
from onward.ops.tap import reading
from onward.program.leaves import leaves_of
from onward.util.checks import check_whole
from onward.util.option_names import checks_option_names
from onward.util.text import described, in_bytes

CPU = torch.device("cpu")

Cache = Any
Params = Any
Forward = Callable[..., tuple[Tensor, Cache]]
# (count) -> a pool of `count` blocks; with sliding layers (count, windows=None), with `windows` blocks for these
NewBlocks = Callable[..., KVPool]


class CacheFactory(Protocol):
    """Create an empty cache for `batch` rows of `max_len` positions."""

    def __call__(self, batch: int, max_len: int) -> Cache: ...


class TapValues(NamedTuple):
    """The values of one position at a tap."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class DividedForward(ABC):
    """The forward of a decoder whose layers run in several processes. Each of them serves the taps of its layers."""

    @property
    @abstractmethod
    def taps(self) -> dict[str, TapValues]:
        """As `Model.taps`."""

    @abstractmethod
    def own_part(self, params: Any) -> tuple[Any, Any]:
        """The architecture and the params of this process's part, with the embedding, the final norm and the head."""


_NOT_COMPILED = "the model does not allow compilation"
_WHY_EAGER = f"{_NOT_COMPILED}; with torch's matrix products the last bits of a row may depend on its batch"


@dataclass(frozen=True, repr=False)
class Model:
    """A forward, its weights and how to make its cache.

    forward: as above; one without `logits_at` is wrapped, so that it takes it too.
    vocab_size: V. max_seq_len: the maximum number of positions; None if unknown.
    device: of its tokens and offsets.
    num_parameters: the number of parameters, with tied ones counted once; None if unknown.
    compiles: whether its forward may be compiled (`onward.compile`). A program reads params at the addresses that they
        had when it was traced: it sees in-place changes but not replaced tensors.
    why_eager: the reason if it is not compiled.
    has_head: whether its logits mean anything; a checkpoint of hidden states alone has no head.
    new_blocks: creates a pool of blocks of 64 positions, of which its forward takes views
        (`onward.cache.PagedKVCache`); None for a forward that supports only the caches of `new_cache`. Several rows of
        a view may be consecutive positions of one text, unless there are recurrent layers: a layer stores the keys and
        values of all rows before it reads any.
    """

    forward: Forward
    params: Params
    new_cache: CacheFactory
    vocab_size: int
    max_seq_len: int | None = None
    device: torch.device = CPU
    num_parameters: int | None = None
    compiles: bool = True
    new_blocks: NewBlocks | None = None
    why_eager: str = _NOT_COMPILED
    trainable: TrainableWeights | None = None
    has_head: bool = True
    weights_lock: WeightsLock = field(default_factory=WeightsLock, compare=False)

    def __post_init__(self) -> None:
        if not takes_logits_at(self.forward):
            object.__setattr__(self, "forward", SelectingForward(self.forward))

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Run the forward; logits [B, T, V], or [R, N, V] at `logits_at` int64 [R, N] of the first R rows."""
        self.refresh()
        with self.weights_lock.reading():
            return logits_and_cache(self.forward(tokens, offsets, cache, self.params, logits_at=logits_at))

    def check_head(self) -> None:
        """Raise `RequestError` if the checkpoint has no head."""
        if not self.has_head:
            raise RequestError(
                "this checkpoint has no head over the vocabulary: it makes embeddings or scores, but no texts and "
                "logprobs"
            )

    def refresh(self) -> None:
        """Bring the packed weights of a trained model up to date."""
        if self.trainable is not None and self.trainable.refresh():
            self.weights_lock.version += 1

    @property
    def weights_version(self) -> int:
        """The number of the current weights: 0 at first. It increases with each update, and when a forward of a trained
        model finds new values of the parameters."""
        return self.weights_lock.version

    def with_params(self, params: Params, version: int = 0) -> "Model":
        """This model with other weights, which are not trained. Tensors of a trained model among them are copied, since
        they change with its parameters. version: the number of the weights."""
        if self.trainable is not None:
            own = {id(leaf) for leaf in leaves_of(self.params) if isinstance(leaf, Tensor)}
            copies: dict[int, Tensor] = {}  # by tensor: a tied weight stays one

            def copied(leaf: object) -> object:
                if not isinstance(leaf, Tensor) or id(leaf) not in own:
                    return leaf
                if id(leaf) not in copies:
                    copies[id(leaf)] = leaf.clone()
                return copies[id(leaf)]

            params = pytree.tree_map(copied, params)
        return replace(self, params=params, trainable=None, weights_lock=WeightsLock(version))

    @cached_property
    def taps(self) -> dict[str, TapValues]:
        """The taps of the forward by name (`onward.tap`). The first use runs it for one token."""
        if isinstance(self.forward, DividedForward):
            return self.forward.taps
        tokens, offsets = (torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in ((1, 1), (1,)))
        with torch.no_grad(), reading(None) as values:
            self(tokens, offsets, self.new_cache(1, 1))
        return {name: TapValues(tuple(value.shape[2:]), value.dtype) for name, value in values.items()}

    @staticmethod
    @checks_option_names
    def from_module(
        module: nn.Module,
        *,
        new_cache: CacheFactory | None = None,
        vocab_size: int | None = None,
        max_seq_len: int | None = None,
        call: ModuleCall | None = None,
    ) -> "Model":
        """A `torch.nn.Module` with a cache argument as a Model.

        The module is called as `module(tokens, offsets, cache) -> (logits, cache)`, with shapes and rules as above, and
        with the keyword `logits_at` if it has a parameter of that name. Its weights are not copied: the next decode
        sees the changes of a training step. Each forward runs without gradients and with every submodule in eval mode;
        modes are restored afterwards, also after an error. (Only the `training` flags are set; the module's own `train`
        and `eval` are not called.)

        Torch's matrix products round differently for different numbers of rows: in float32 the last bits of a row's
        logits, and rarely a token, may depend on its batch and chunks. A forward with `params` runs as a program, whose
        kernels always give a row the same bits.

        A causal language model of transformers needs no other arguments: it keeps its own forward and attention, over
        an `onward.KVCache`. One token is processed here, to see what it caches. For a peft model, pass
        `get_base_model()`, whose layers contain the adapter (docs/training.md).

        Args:
            module: on its final device.
            new_cache: (batch, max_len) -> an empty cache; the module's own `new_cache` by default.
            vocab_size: V of the logits; the module's own `vocab_size` by default.
            max_seq_len: the maximum number of positions; the module's own `max_seq_len`, if any, by default.
            call: (module, tokens, offsets, cache) -> (logits, cache), for a module with another signature. It may take
                the keyword `logits_at`.

        Raises:
            RequestError: not a module; new_cache or vocab_size is neither an argument nor an attribute of the module;
                a model of transformers that is not a decoder, or caches more than keys and values. A forward raises it
                if the module does not return (logits, cache), or logits of another shape.
        """
        if not isinstance(module, nn.Module):
            raise RequestError(f"from_module takes a torch.nn.Module; got {type(module).__name__}")
        if new_cache is None and call is None and is_causal_lm(module) and not hasattr(module, "new_cache"):
            causal_lm = CausalLM.of(module)
            call, new_cache = causal_lm, causal_lm.new_cache
            vocab_size = causal_lm.vocab_size if vocab_size is None else vocab_size
            max_seq_len = causal_lm.max_seq_len if max_seq_len is None else max_seq_len
        new_cache = _option_or_attribute(module, "new_cache", new_cache)
        vocab_size = _option_or_attribute(module, "vocab_size", vocab_size)
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
            device=next((tensor.device for tensor in forward.params.values()), CPU),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            # Training may replace the module's tensors.
            compiles=False,
            why_eager=_WHY_EAGER,
        )

    def __repr__(self) -> str:
        return described(self, *self.facts())

    def facts(self) -> list[str]:
        """The parts of the repr."""
        parameters = "" if self.num_parameters is None else f"{self.num_parameters:,} parameters"
        context = "" if self.max_seq_len is None else f"context {self.max_seq_len:,}"
        vocabulary = f"vocabulary {self.vocab_size:,}"
        return [parameters, in_bytes(self.nbytes), vocabulary, context, f"on {self.device}"]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, in memory or mapped; shared tensors count once."""
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(self.params) if isinstance(leaf, Tensor)}
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())


def _option_or_attribute(module: nn.Module, name: str, option: Any) -> Any:
    """The option, or the module's attribute of that name."""
    value = getattr(module, name, None) if option is None else option
    if value is None:
        # A PeftModel hides the module that it wraps; that one reads the adapter's weights too.
        advice = "pass module.get_base_model()" if hasattr(module, "get_base_model") else "pass it"
        raise RequestError(
            f"from_module needs {name}, and this {type(module).__name__} has no such attribute: {advice}"
        )
    return value


def computation(model: Model) -> "tuple[WeightsVersion, ops.OpsBackend | None, torch.dtype | None]":
    """The inputs of keys and values other than the ids: the current weights, the kernels, and autocast."""
    device = model.device.type
    return WeightsVersion(model), ops.choice() if device == "cpu" else None, autocast_dtype_on(device)


@final
class WeightsVersion:
    """A snapshot of a model's weights: which tensors, their addresses, and their write counts. Compare two with ==.

    It keeps no tensor alive. It sees an optimizer's step (a fused one too), `load_state_dict`, Onward's own kernels,
    an assignment to `tensor.data` and every other write that torch counts. It does not see writes through
    `tensor.data`, a NumPy array or a mapped file: call `torch.autograd.graph.increment_version(tensor)` after one.

    Torch does not count writes to tensors created in inference mode, so snapshots with one are never equal.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        model.refresh()
        params = model.params
        if isinstance(model.forward, ModuleForward) and params is model.forward.params:
            params = model.forward.look_up()
        tensors = [leaf for leaf in leaves_of(params) if isinstance(leaf, Tensor)]
        self._tensors = [(weakref.ref(tensor), _state_of(tensor)) for tensor in tensors]

    def is_of(self, model: Model) -> bool:
        """Whether the snapshot is of this model, at any time."""
        return self._model() is model

    def __eq__(self, other: object) -> bool:
        model = self._model()
        if not isinstance(other, WeightsVersion) or model is None or not other.is_of(model):
            return False
        return len(self._tensors) == len(other._tensors) and all(
            mine() is theirs() is not None and state is not None and state == their_state
            for (mine, state), (theirs, their_state) in zip(self._tensors, other._tensors, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _state_of(tensor: Tensor) -> tuple[object, ...] | None:
    """A tensor's storage, address and write count; None if they are unknown."""
    if tensor.is_inference():
        return None
    # Subclasses and other layouts may lack memory of their own.
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return (tensor._version,)
    # An assignment to `data` is not counted as a write, and new memory may have a freed address. But no storage is
    # created at the address of one that a weak reference names.
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, tensor.data_ptr(), tensor._version


def _count_fused_writes(optimizer: Optimizer, args: Any, keywords: Any) -> None:
    """Count the writes of optimizers with fused=True, which torch does not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([parameter for parameter in group["params"] if parameter.grad is not None])


register_optimizer_step_post_hook(_count_fused_writes)
