"""A torch module as a forward, in eval mode and without gradients, with its own tensors or others of the same names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onward.errors import RequestError
from onward.models.contract import logits_and_cache

# (module, tokens, offsets, cache) -> (logits, cache): calls a module whose own signature is another.
ModuleCall = Callable[..., tuple[Tensor, Any]]


class ModuleForward:
    """The forward of a module: (tokens, offsets, cache, params) -> (logits, cache).

    params: the module's parameters and buffers by name, the tensors themselves. A call with this very dict looks
    them up anew, so that it also sees tensors that were replaced (an assigned buffer, a parameter loaded with
    assign=True). A call with another dict of the same names (averaged weights, say) uses that dict's tensors.
    """

    def __init__(self, module: nn.Module, call: ModuleCall | None, vocab_size: int) -> None:
        self.params = _tensors_of(module)
        self.call = call
        self._module = module
        self._callee = _ModuleWithCall(module, call)
        self._vocab_size = vocab_size

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: dict[str, Tensor], *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """`logits_at` is passed on to the module unless it is None: see `Model.selects_logits`."""
        replacements: dict[str, Tensor] = {}
        if params is self.params:
            self.look_up()
        else:
            self._check_names(params)
            replacements = {f"module.{name}": tensor for name, tensor in params.items()}
        _check_device(params, tokens)
        keywords = {} if logits_at is None else {"logits_at": logits_at}
        inputs = (tokens, offsets, cache)
        with torch.no_grad(), eval_mode(self._module):
            result = (
                functional_call(self._callee, replacements, inputs, keywords)
                if replacements
                else self._callee(*inputs, **keywords)
            )
        return self._checked(result, tokens if logits_at is None else logits_at)

    def look_up(self) -> dict[str, Tensor]:
        """Update `params` to the tensors that the module has now, and return it."""
        # Changed only where the module's tensors are others, and never empty: other threads read it meanwhile.
        now = _tensors_of(self._module)
        if now.keys() != self.params.keys() or any(now[name] is not self.params[name] for name in now):
            for name in self.params.keys() - now.keys():
                del self.params[name]
            self.params.update(now)
        return self.params

    def _check_names(self, params: dict[str, Tensor]) -> None:
        if unpaired := sorted(params.keys() ^ self.params.keys()):
            raise RequestError(
                f"params must have the names of the module's own parameters and buffers; {unpaired[0]!r} is in one only"
            )

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
    """Within the block every submodule is in eval mode; after it, also after an error, each is in its former mode.

    Only the flags `training` are set: a module's own `train` and `eval`, which may do more, are not called.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class _ModuleWithCall(nn.Module):
    """A module whose forward is `call`, for `functional_call`, which calls modules only."""

    def __init__(self, module: nn.Module, call: ModuleCall | None) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, tokens: Tensor, offsets: Tensor, cache: Any, **keywords: Tensor) -> Any:
        if self._call is None:
            return self.module(tokens, offsets, cache, **keywords)
        return self._call(self.module, tokens, offsets, cache, **keywords)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. A tied tensor has its first name only; functional_call replaces it everywhere."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _check_device(params: dict[str, Tensor], tokens: Tensor) -> None:
    device = next((tensor.device for tensor in params.values()), tokens.device)
    if device != tokens.device:
        raise RequestError(
            f"the module is on {device}, but its Model was made for {tokens.device}: make the Model again after "
            "moving the module"
        )
