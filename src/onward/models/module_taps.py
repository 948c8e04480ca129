"""The taps of a causal language model of transformers, by hooks on its layers while somebody asks for them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from onward.ops.tap import is_active, tap


@contextmanager
def module_taps(module: Any) -> Iterator[None]:
    """Give the forwards within the block the taps of a family: "embedding", "layers.N" and "norm".

    "embedding" is the first layer's input, and "norm" is what the decoder returns for the head. A module without a
    list of its layers has no taps.
    """
    decoder, layers = _decoder(module) if is_active() else (None, ())
    with ExitStack() as hooks:
        if decoder is not None:
            hooks.callback(next(iter(layers)).register_forward_pre_hook(_tap_input, with_kwargs=True).remove)
            for number, layer in enumerate(layers):
                hooks.callback(layer.register_forward_hook(_Output(f"layers.{number}")).remove)
            hooks.callback(decoder.register_forward_hook(_Output("norm")).remove)
        yield


def _decoder(module: Any) -> tuple[nn.Module | None, Iterable[nn.Module]]:
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
