"""New weights for a model, from tensors by stock name: checked and packed before any weight changes."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from onward.cache.plan import CachePlan
from onward.checkpoint.stored_names import is_buffer
from onward.errors import OptionError, RequestError
from onward.models import (
    Architecture,
    LatentLinear,
    Model,
    Router,
    ShortConv,
    WeightScope,
    architecture_of,
    map_marked,
    named_params,
    pack_layer,
    pack_params,
    parameter_name,
    parameter_shapes,
    stack_params,
)
from onward.models.adapters import Adapters
from onward.models.architecture import is_unread
from onward.models.key_balance import balanced_keys
from onward.native.machine import file_mappings, replace_file_pages
from onward.ops import QuantizedExperts, QuantizedWeight
from onward.ops.quantized import ROUNDED_FORMATS, rounded_formats
from onward.program.leaves import leaves_of
from onward.quantization.params import FormatChoice, ParamsQuantizer
from onward.util.checks import check_whole
from onward.util.process import sigint_deferred

# Tensors by their names in the model's checkpoint, as `named_parameters` and `state_dict` of a module give them.
NewWeights: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_HEAD = "lm_head.weight"


class WeightsUpdate:
    """An update of a model's weights. Creating it checks the tensors, and converts them as `onward.load` does; `apply`
    copies the result to the model's own tensors, which cannot fail for a reason that lies in them.

    adapters: those of the model. version: the number of the new weights; None for the next one.

    Raises:
        RequestError: tensors that are missing, unknown, of another shape or not finite in the model's dtype; a model of
            no built-in family, with adapters or with weights that another tool has quantized; a version that is not
            above the current one.
    """

    def __init__(self, model: Model, adapters: Adapters, weights: NewWeights, version: int | None = None) -> None:
        model.weights_lock.check_outside()
        if adapters:
            raise RequestError(f"adapters are loaded for the current weights: drop {', '.join(adapters)} first")
        self._model, self._version = model, version
        self._check_version()
        architecture = architecture_of(model)
        if architecture is None:
            raise RequestError(
                "update_weights needs a model of a built-in family in this process: a Model.from_module reads its "
                "module's parameters at each step, so write to those; several processes (pipeline=) load a folder"
            )
        tensors = _by_name(weights)
        _check_names(architecture, tensors)
        self._pairs = _trained(model, tensors) if model.trainable is not None else _packed(model, architecture, tensors)

    def apply(self) -> int:
        """Replace the weights between two forwards, and return their version."""
        model = self._model
        with model.weights_lock.writing(), torch.no_grad(), sigint_deferred():
            self._check_version()
            mappings = file_mappings()
            sources = {new.untyped_storage().data_ptr() for _, new in self._pairs}
            for old, new in self._pairs:
                is_source = old.untyped_storage().data_ptr() in sources  # the model's own weights, passed back
                if old.device.type == "cpu" and old.is_contiguous() and not is_source:
                    replace_file_pages(old.data_ptr(), old.nbytes, mappings)
                old.copy_(new)
            self._pairs = []
            model.refresh()
            model.weights_lock.version = self._version or model.weights_version + (model.trainable is None)
            return model.weights_version

    def _check_version(self) -> None:
        if self._version is None:
            return
        check_whole("version", self._version, low=1)
        if self._version <= self._model.weights_version:
            raise OptionError(
                "version",
                f"must be above that of the current weights, {self._model.weights_version}; got {self._version}",
            )


def _by_name(weights: Any) -> dict[str, Tensor]:
    """The tensors by name; those that parameters are views of are not followed by autograd."""
    expected = (
        "update_weights takes tensors by stock name: a mapping, or pairs (name, tensor) such as named_parameters()"
    )
    items = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(items, Iterable) or isinstance(items, str | Tensor):
        raise RequestError(f"{expected}; got {type(weights).__name__}")
    tensors: dict[str, Tensor] = {}
    for item in items:
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
            raise RequestError(f"{expected}; got an item of type {type(item).__name__}")
        name, tensor = item
        if not isinstance(tensor, Tensor):
            raise RequestError(f"{expected}; {name!r} is of type {type(tensor).__name__}")
        if name in tensors:
            raise RequestError(f"{name!r} is there twice")
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
            raise RequestError(f"{name!r} must be a dense tensor of floats; got {tensor.dtype} on {tensor.device}")
        tensors[name] = tensor.detach()
    return tensors


def _check_names(architecture: Architecture, tensors: dict[str, Tensor]) -> None:
    """Raise `RequestError` unless these are the weights of the architecture. Buffers, other parts of the checkpoint and
    the head of a tied model, which must equal the embedding, are dropped."""
    shapes = parameter_shapes(architecture)
    for name in [name for name in tensors if name not in shapes and (is_buffer(name) or is_unread(architecture, name))]:
        del tensors[name]
    if missing := [name for name in shapes if name not in tensors]:
        raise RequestError(
            f"{len(missing)} of {len(shapes)} weights are missing, such as {missing[0]!r}: an update has all of them "
            "(lm.named_parameters of a trained model, or the tensors of a checkpoint)"
        )
    unknown = [name for name in tensors if name not in shapes]
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise RequestError(f"{name!r} has the shape {list(tensors[name].shape)}, and the model's is {list(shape)}")
    if unknown == [_HEAD] and architecture.tie_word_embeddings:
        head, embedding = tensors.pop(_HEAD), tensors[named_params(architecture).embed_tokens.weight]
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            raise RequestError(
                f"the model's head is tied to its embedding, but {_HEAD!r} differs from it: leave it out"
            )
    elif unknown:
        raise RequestError(f"{len(unknown)} tensors are not weights of the model, such as {unknown[0]!r}")


def _check_finite(name: str, tensor: Tensor) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise RequestError(f"{name!r} has values that are not finite in the model's {tensor.dtype}")
    return tensor


def _trained(model: Model, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a trained model, and their new values. Its packed weights follow them."""
    assert model.trainable is not None, "it is trained"
    dtype = model.params.embed_tokens.weight.dtype
    pairs = []
    for name, parameter in model.trainable.parameters.items():
        new = tensors[name]
        _check_finite(name, new.to(dtype))
        if new.data_ptr() != parameter.data_ptr():
            pairs.append((parameter.detach(), new))
    return pairs


class _Converted:
    """The tensors in the model's dtype, for `Architecture.read`; copies, and one for each name while it is in use."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._used: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._used.get(name)
        if tensor is None:
            tensor = self._tensors[name].to(device=self._device, dtype=dtype or self._dtype, copy=True).contiguous()
            self._used[name] = _check_finite(name, tensor)
        return tensor


def _packed(model: Model, architecture: Architecture, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tensors of the model's params, and their new values: those that `onward.load` would make."""
    formats = _formats(model.params)
    dtype, device = model.params.embed_tokens.weight.dtype, model.device
    place = pack_layer if device.type == "cpu" else stack_params
    each_layer = (lambda layer: layer) if formats else place
    params = architecture.read(WeightScope(_Converted(tensors, dtype, device)), each_layer)
    if formats:
        params = ParamsQuantizer(params, formats).quantized(params)
    params = pack_params(params) if device.type == "cpu" else stack_params(params)
    plan = model.new_blocks.args[0] if isinstance(model.new_blocks, partial) else None
    if isinstance(plan, CachePlan) and plan.format is not None:
        params = balanced_keys(architecture, params)
    pairs = list(zip(leaves_of(model.params), leaves_of(params), strict=True))
    for old, new in pairs:
        same = old.shape == new.shape and old.dtype == new.dtype if isinstance(old, Tensor) else old == new
        assert same, "the same tensors are packed in the same way"
    return [(old, new) for old, new in pairs if isinstance(old, Tensor)]


def _formats(params: Any) -> dict[str, FormatChoice]:
    """The format of each quantized matrix by its name in the params; none for a model in floats."""
    formats: dict[str, FormatChoice] = {}
    floats: list[str] = []

    def collect(path: tuple[Any, ...], part: Any) -> Any:
        name = f"{parameter_name(path)}.weight"
        if isinstance(part.weight, QuantizedWeight | QuantizedExperts):
            formats[name] = FormatChoice(part.weight.format)
        elif not isinstance(part, Router | ShortConv | LatentLinear):
            floats.append(name)
        return part

    map_marked(collect, params)
    if formats:
        others = [f"{name} is {each.format}" for name, each in formats.items() if each.format not in ROUNDED_FORMATS]
        if others := others or [f"{name} is not quantized" for name in floats]:
            raise RequestError(
                f"update_weights rounds all matrices to {rounded_formats()}, or none, and {others[0]}: load the model "
                "in floats, or with quantize="
            )
    return formats
