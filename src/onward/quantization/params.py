"""Quantize every matrix of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.checkpoint.quantized import parameter_name
from onward.errors import RequestError
from onward.language_model import LanguageModel
from onward.models import DecoderParams, Model
from onward.ops import QuantizedWeight, Weight
from onward.ops.linear import OneDnnWeight
from onward.ops.packed import NativeWeight
from onward.quantization.rounding import check_format, quantize_and_measure

_WEIGHTS = (Tensor, QuantizedWeight, NativeWeight, OneDnnWeight)


@dataclass(frozen=True)
class TensorReport:
    """How one matrix was quantized.

    name: its place in the params, such as "layers.3.q_proj.weight".
    relative_rms_error: sqrt(sum (w - w')² / sum w²).
    nbytes: of the quantized weight.
    """

    name: str
    shape: tuple[int, int]
    relative_rms_error: float
    nbytes: int


Progress = Callable[[TensorReport], None]


@overload
def quantize(model: Model, format: str, *, progress: Progress | None = None) -> Model: ...


@overload
def quantize(model: LanguageModel, format: str, *, progress: Progress | None = None) -> LanguageModel: ...


def quantize(model: Model | LanguageModel, format: str, *, progress: Progress | None = None) -> Model | LanguageModel:
    """The same model with all its matrices in 8 or 4 bits, the embedding and the head among them.

    Norms and biases stay. The original model is not changed; drop it to free its weights.

    Args:
        model: a `LanguageModel` or a `Model` of a built-in family, as loaded.
        format: "int8" (a scale for each row) or "int4" (a scale for each 32 inputs of a row).
        progress: called with each matrix's report, in order. A tied pair has one report.

    Raises:
        RequestError: another format, a model of no built-in family, a model that is quantized already, or weights that
            are not finite. A forward of your own can call `ops.linear` with weights from `quantize_int8` and
            `quantize_int4`.
    """
    if isinstance(model, LanguageModel):
        return model.with_model(quantize(model.model, format, progress=progress))
    if not isinstance(model.params, DecoderParams):
        raise RequestError(
            f"quantize knows the matrices of the built-in families; got a model whose params are "
            f"{type(model.params).__name__}: make its weights with quantize_int8 or quantize_int4"
        )
    params, _ = quantize_params(model.params, format, progress=progress)
    return replace(model, params=params)


def quantize_params(
    params: DecoderParams,
    format: str,
    *,
    progress: Progress | None = None,
    release: Callable[[], None] = lambda: None,
) -> tuple[DecoderParams, list[TensorReport]]:
    """The params with all matrices quantized, and a report of each. A tied pair stays one weight.

    Args:
        params: stock or packed.
        format: "int8" or "int4".
        progress: called after each matrix with its report.
        release: called after each matrix, when its stock weight has been read for the last time.
    """
    check_format(format)
    reports: list[TensorReport] = []
    quantized_by_id: dict[int, QuantizedWeight] = {}
    tied = _is_tied(params)

    def convert(path: tuple[Any, ...], leaf: Any) -> Any:
        if not _is_matrix(leaf):
            return leaf
        name = parameter_name(path)
        if isinstance(leaf, QuantizedWeight):
            raise RequestError(f"{name} is {leaf.format} already: quantize the model in its stock weights")
        source = params.embed_tokens if tied and leaf is params.lm_head else leaf
        if id(source) not in quantized_by_id:
            quantized_by_id[id(source)], report = _quantize(name, _stock(source), format)
            reports.append(report)
            if progress is not None:
                progress(report)
            release()
        return quantized_by_id[id(source)]

    quantized: DecoderParams = pytree.tree_map_with_path(convert, params, is_leaf=_is_weight)
    return quantized, reports


def _quantize(name: str, weight: Tensor, format: str) -> tuple[QuantizedWeight, TensorReport]:
    try:
        quantized, error = quantize_and_measure(weight, format)
    except RequestError as refused:
        raise RequestError(f"{name}: {refused}") from refused
    return quantized, TensorReport(name, quantized.shape, error, quantized.nbytes)


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, _WEIGHTS)


def _is_matrix(leaf: Any) -> bool:
    """Whether a leaf is a matrix: all packed weights are, and tensors that are no vectors (norms and biases are)."""
    return _is_weight(leaf) and not (isinstance(leaf, Tensor) and leaf.dim() < 2)


def _is_tied(params: DecoderParams) -> bool:
    """Whether head and embedding are one matrix. The head may be its packed copy, in which rows cannot be looked up."""
    if params.lm_head is params.embed_tokens:
        return True
    if isinstance(params.lm_head, Tensor | QuantizedWeight) or not isinstance(params.embed_tokens, Tensor):
        return False
    return torch.equal(_stock(params.lm_head), params.embed_tokens)


def _stock(weight: Weight) -> Tensor:
    """The float weight [N, K] of a weight, packed or not."""
    if isinstance(weight, NativeWeight):
        return weight.unpack()
    if isinstance(weight, OneDnnWeight):
        return weight.blocks.to_dense()
    assert isinstance(weight, Tensor)
    return weight
