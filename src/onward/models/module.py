"""A torch module as a forward: called as it is, or with other tensors of its names, in eval mode, without gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onward.errors import RequestError
from onward.models.contract import logits_and_cache

# (module, tokens, offsets, cache) -> (logits, cache), for a module of another signature than the convention's.
ModuleCall = Callable[..., tuple[Tensor, Any]]


class ModuleForward:
    """The forward of a module: (tokens, offsets, cache, params) -> (logits, cache).

    params: the module's parameters and buffers by name, the tensors themselves. A call with this very dict looks
    them up anew, so that it also sees those that were replaced (a buffer assigned to, a parameter loaded with
    assign=True); another dict of the same names is used as it is (averaged weights, say).
    """

    def __init__(self, module: nn.Module, call: ModuleCall | None, vocab_size: int) -> None:
        self.params = _tensors_of(module)
        self._module = module
        self._called = _Called(module, call)
        self._vocab_size = vocab_size

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: dict[str, Tensor], *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """`logits_at` is handed to the module only where it is given: see `Model.selects_logits`."""
        named: dict[str, Tensor] = {}
        if params is self.params:
            self.look_up()
        else:
            self._check_names(params)
            named = {f"module.{name}": tensor for name, tensor in params.items()}
        _check_device(params, tokens)
        wanted = {} if logits_at is None else {"logits_at": logits_at}
        inputs = (tokens, offsets, cache)
        with torch.no_grad(), eval_mode(self._module):
            returned = (
                functional_call(self._called, named, inputs, wanted) if named else self._called(*inputs, **wanted)
            )
        return self._checked(returned, tokens if logits_at is None else logits_at)

    def look_up(self) -> dict[str, Tensor]:
        """`params`, brought up to the tensors that the module has now."""
        self.params.clear()
        self.params.update(_tensors_of(self._module))
        return self.params

    def _check_names(self, params: dict[str, Tensor]) -> None:
        if differ := sorted(params.keys() ^ self.params.keys()):
            raise RequestError(
                f"params must have the names of the module's own parameters and buffers; {differ[0]!r} is in one only"
            )

    def _checked(self, returned: object, at: Tensor) -> tuple[Tensor, Any]:
        advice = ": adapt it with call=lambda module, tokens, offsets, cache: (…, cache)"
        logits, cache = logits_and_cache(returned, "the module", advice)
        wanted = [*at.shape, self._vocab_size]
        if list(logits.shape) != wanted or not logits.is_floating_point():
            raise RequestError(
                f"the module must return float logits [B, T, V] {wanted}; got {logits.dtype} {list(logits.shape)}"
            )
        return logits, cache


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Every part of the module in eval mode within the block, and in its former mode after it, however it ends.

    The flags alone are set: `train` and `eval` of a module, which may do more, are not called.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class _Called(nn.Module):
    """What functional_call is given: it only ever calls a module, and `call` is a function around one."""

    def __init__(self, module: nn.Module, call: ModuleCall | None) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, tokens: Tensor, offsets: Tensor, cache: Any, **wanted: Tensor) -> Any:
        if self._call is None:
            return self.module(tokens, offsets, cache, **wanted)
        return self._call(self.module, tokens, offsets, cache, **wanted)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A tied tensor is there once, under its first name; functional_call puts it in all its places."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _check_device(params: dict[str, Tensor], tokens: Tensor) -> None:
    device = next((tensor.device for tensor in params.values()), tokens.device)
    if device != tokens.device:
        raise RequestError(
            f"the module is on {device}, but its Model was made for {tokens.device}: make the Model again after "
            "moving the module"
        )
