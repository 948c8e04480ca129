"""Quantize every matrix of a model's params."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import RequestError
from onward.models import ExpertLinear, LatentLinear, Router, ShortConv, map_marked, marked_parts, parameter_name
from onward.models.linear import float_weight
from onward.ops import QuantizedExperts, QuantizedWeight, Weight
from onward.ops.quantized import ROUNDED_FORMATS
from onward.quantization.gptq import quantize_with_feedback
from onward.quantization.rounding import check_format, quantize_and_measure


@dataclass(frozen=True)
class TensorReport:
    """How one matrix was quantized.

    name: its place in the params, such as "layers.3.mixer.q_proj.weight".
    relative_rms_error: sqrt(sum (w - w')² / sum w²).
    nbytes: of the quantized weight.
    format: "int8", "int4" or "iq4_nl".
    relative_output_error: the same for the outputs, on the calibration text; None if the matrix was rounded to nearest.
    divergence: the KL divergence from the original model, in nats per token, if only this matrix is rounded to nearest
        in iq4_nl. A bit budget is spent by it; None without a budget.
    """

    name: str
    shape: tuple[int, int]
    relative_rms_error: float
    nbytes: int
    format: str
    relative_output_error: float | None = None
    divergence: float | None = None

    @property
    def bits(self) -> float:
        """Bits per weight, including scales."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


# Routers and convolutions are sensitive and small. The matrix of latents is read by rows and by columns, and scales per
# row suit only one of these.
_UNQUANTIZED = Router | ShortConv | LatentLinear

Progress = Callable[[TensorReport], None]


def quantize_params(
    params: Any,
    format: str,
    *,
    progress: Progress | None = None,
    release: Callable[[], None] = lambda: None,
    keep: bool = False,
) -> tuple[Any, list[TensorReport]]:
    """The params with all matrices but `_UNQUANTIZED` quantized, and a report of each. A tied pair stays one weight.
    release: called after each matrix, once its stock weight is no longer needed. keep: leave experts that are already
    quantized unchanged; else they are an error."""
    quantizer = ParamsQuantizer(params, format, progress, release, keep)
    return quantizer.quantized(params), quantizer.reports


class FormatChoice(NamedTuple):
    """The format of a matrix. divergence: as in `TensorReport`, if it was measured."""

    format: str
    divergence: float | None = None


class ParamsQuantizer:
    """Quantizes the matrices of params, in one call or part by part. reports: of the matrices so far. format: as for
    `quantize_params`, or a choice for each matrix, by a name such as "layers.3.mixer.q_proj.weight"."""

    def __init__(
        self,
        params: Any,
        format: str | Mapping[str, FormatChoice],
        progress: Progress | None = None,
        release: Callable[[], None] = lambda: None,
        keep: bool = False,
    ) -> None:
        if isinstance(format, str):
            check_format(format)
        self.reports: list[TensorReport] = []
        self._count = count_matrices(params)
        self._format = format
        self._progress, self._release, self._keep = progress, release, keep
        self._by_id: dict[int, QuantizedWeight] = {}

    @property
    def fraction(self) -> float:
        """The fraction of matrices that are done, from 0 to 1; a tied head counts as one."""
        return min(1.0, len(self.reports) / self._count)

    def quantized(
        self, params: Any, under: tuple[Any, ...] = (), hessians: Mapping[tuple[Any, ...], Tensor] | None = None
    ) -> Any:
        """The params, at the path `under` in those of the model, with their matrices quantized. hessians: of inputs,
        by the path of `Linear` in these params, for `onward.quantization.gptq`; an expert's path ends in its number."""
        known = {} if hessians is None else hessians

        def convert(path: tuple[Any, ...], part: Any) -> Any:
            name = f"{parameter_name((*under, *path))}.weight"
            if self._keep and isinstance(part, ExpertLinear) and _is_quantized(part):
                return part._replace(weight=part.together)
            if isinstance(part.weight, QuantizedWeight | QuantizedExperts) and part.weight.format in ROUNDED_FORMATS:
                raise RequestError(f"{name} is already {part.weight.format}: quantize the original model")
            if isinstance(part, _UNQUANTIZED):
                return part
            if isinstance(part, ExpertLinear):
                choice = self._choice(name)
                experts = [
                    self._quantize(f"{name}.{index}", weight, choice, known.get((*path, pytree.SequenceKey(index))))
                    for index, weight in enumerate(part.matrices)
                ]
                return part._replace(weight=QuantizedExperts.stack(experts))
            source = id(part.weight)  # a tied pair has one
            if source not in self._by_id:
                self._by_id[source] = self._quantize(name, part.weight, self._choice(name), known.get(path))
            return part._replace(weight=self._by_id[source])

        return map_marked(convert, params)

    def _choice(self, name: str) -> FormatChoice:
        return FormatChoice(self._format) if isinstance(self._format, str) else self._format[name]

    def _quantize(
        self, name: str, weight: Weight, choice: FormatChoice, hessian: Tensor | None = None
    ) -> QuantizedWeight:
        output_error = None
        floats = float_weight(weight)
        try:
            if hessian is None:
                quantized, error = quantize_and_measure(floats, choice.format)
            else:
                quantized, error, output_error = quantize_with_feedback(floats, hessian, choice.format)
        except RequestError as refused:
            raise RequestError(f"{name}: {refused}") from refused
        report = TensorReport(
            name, quantized.shape, error, quantized.nbytes, quantized.format, output_error, choice.divergence
        )
        self.reports.append(report)
        if self._progress is not None:
            self._progress(report)
        self._release()
        return quantized


def count_matrices(params: Any) -> int:
    """The number of reports of `quantize_params` for these params, if none are tied."""
    parts = [part for part in marked_parts(params) if not isinstance(part, _UNQUANTIZED)]
    experts = [part for part in parts if isinstance(part, ExpertLinear)]
    return len(parts) - len(experts) + sum(len(part.matrices) for part in experts if not _is_quantized(part))


def _is_quantized(experts: ExpertLinear) -> bool:
    return isinstance(experts.matrices[0], QuantizedWeight)
