"""Quantize every matrix of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from onward.checkpoint.quantized import parameter_name
from onward.errors import RequestError
from onward.language_model import LanguageModel
from onward.models import Embedding, ExpertLinear, Model, Router, ShortConv, map_marked, marked_parts
from onward.ops import QuantizedExperts, QuantizedWeight, Weight
from onward.ops.linear import OneDnnWeight, stock_weight, weight_shape
from onward.ops.packed import NativeWeight
from onward.quantization.rounding import check_format, quantize_and_measure


@dataclass(frozen=True)
class TensorReport:
    """How one matrix was quantized.

    name: its place in the params, such as "layers.3.mixer.q_proj.weight".
    relative_rms_error: sqrt(sum (w - w')² / sum w²).
    nbytes: of the quantized weight.
    """

    name: str
    shape: tuple[int, int]
    relative_rms_error: float
    nbytes: int


_KEPT = Router | ShortConv  # in floats: they decide much, and are small

Progress = Callable[[TensorReport], None]


@overload
def quantize(model: Model, format: str, *, progress: Progress | None = None) -> Model: ...


@overload
def quantize(model: LanguageModel, format: str, *, progress: Progress | None = None) -> LanguageModel: ...


def quantize(model: Model | LanguageModel, format: str, *, progress: Progress | None = None) -> Model | LanguageModel:
    """The same model with all its matrices in 8 or 4 bits, the embedding and the head among them.

    Norms, biases, short convolutions and the routers of experts stay. The original model is not changed; drop it to
    free its weights.

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
    if not marked_parts(model.params):
        raise RequestError(
            f"quantize finds matrices by their types, Linear and Embedding; got a model whose params are "
            f"{type(model.params).__name__}, without any: make its weights with quantize_int8 or quantize_int4"
        )
    params, _ = quantize_params(model.params, format, progress=progress)
    return replace(model, params=params)


def quantize_params(
    params: Any,
    format: str,
    *,
    progress: Progress | None = None,
    release: Callable[[], None] = lambda: None,
    keep: bool = False,
) -> tuple[Any, list[TensorReport]]:
    """The params with all matrices but `_KEPT` quantized, and a report of each. A tied pair stays one weight.

    Args:
        params: stock or packed; `onward.models.Linear` and `Embedding` mark the matrices.
        format: "int8" or "int4".
        progress: called after each matrix with its report.
        release: called after each matrix, when its stock weight has been read for the last time.
        keep: leave experts that are quantized already as they are; else they are an error.
    """
    check_format(format)
    reports: list[TensorReport] = []
    quantized_by_id: dict[int, QuantizedWeight] = {}
    embeddings = [part.weight for part in marked_parts(params) if isinstance(part, Embedding)]

    def quantized(name: str, weight: Weight) -> QuantizedWeight:
        result, report = _quantize(name, stock_weight(weight), format)
        reports.append(report)
        if progress is not None:
            progress(report)
        release()
        return result

    def convert(path: tuple[Any, ...], part: Any) -> Any:
        name = f"{parameter_name(path)}.weight"
        if keep and isinstance(part, ExpertLinear) and _is_quantized(part):
            return part._replace(weight=part.together)
        if isinstance(part.weight, QuantizedWeight | QuantizedExperts):
            raise RequestError(f"{name} is {part.weight.format} already: quantize the model in its stock weights")
        if isinstance(part, _KEPT):
            return part
        if isinstance(part, ExpertLinear):
            experts = [quantized(f"{name}.{index}", weight) for index, weight in enumerate(part.matrices)]
            return part._replace(weight=QuantizedExperts.stack(experts))
        source = _tied_to(part.weight, embeddings)
        if id(source) not in quantized_by_id:
            quantized_by_id[id(source)] = quantized(name, source)
        return part._replace(weight=quantized_by_id[id(source)])

    return map_marked(convert, params), reports


def count_matrices(params: Any) -> int:
    """How many reports `quantize_params` gives of these params, where none are tied."""
    return sum(_count(part) for part in marked_parts(params))


def _count(part: Any) -> int:
    if isinstance(part, ExpertLinear):
        return 0 if _is_quantized(part) else len(part.matrices)
    return not isinstance(part, _KEPT)


def _is_quantized(experts: ExpertLinear) -> bool:
    return isinstance(experts.matrices[0], QuantizedWeight)


def _quantize(name: str, weight: Tensor, format: str) -> tuple[QuantizedWeight, TensorReport]:
    try:
        quantized, error = quantize_and_measure(weight, format)
    except RequestError as refused:
        raise RequestError(f"{name}: {refused}") from refused
    return quantized, TensorReport(name, quantized.shape, error, quantized.nbytes)


def _tied_to(weight: Weight, embeddings: Sequence[Weight]) -> Weight:
    """The embedding that a weight is tied to, or itself. It may be a packed copy, in which rows cannot be looked up."""
    if isinstance(weight, NativeWeight | OneDnnWeight):
        for embedding in embeddings:
            if (
                isinstance(embedding, Tensor)
                and weight_shape(weight) == embedding.shape
                and torch.equal(stock_weight(weight), embedding)
            ):
                return embedding
    return weight
