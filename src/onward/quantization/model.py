"""Quantize a model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

from onward.checks import is_finite
from onward.errors import RequestError
from onward.language_model import LanguageModel
from onward.models import Model, marked_parts
from onward.ops.quantized import rounded_formats
from onward.quantization.budget import MEASURED, choose_formats
from onward.quantization.calibration import Calibration, calibrated_params, calibration_ids
from onward.quantization.params import ParamsQuantizer, Progress, TensorReport
from onward.quantization.rounding import check_format


@overload
def quantize(
    model: Model, format: str | float, *, progress: Progress | None = None, calibrate: Calibration | None = None
) -> Model: ...


@overload
def quantize(
    model: LanguageModel, format: str | float, *, progress: Progress | None = None, calibrate: Calibration | None = None
) -> LanguageModel: ...


def quantize(
    model: Model | LanguageModel,
    format: str | float,
    *,
    progress: Progress | None = None,
    calibrate: Calibration | None = None,
) -> Model | LanguageModel:
    """The same model with all its matrices in 8 or 4 bits, the embedding and the head among them.

    Norms, biases, short convolutions, the routers of experts and the matrices of latents (MLA's `kv_b_proj`) stay. The
    original model is not changed; drop it to free its weights.

    Args:
        model: a `LanguageModel` or a `Model` of a built-in family, as loaded.
        format: "int8" (a scale for each row), "int4" or "iq4_nl" (a scale for each 32 inputs of a row, for whole
            numbers or for the table of IQ4_NL, which errs less); or a number, the most bits a weight on average:
            matrices that cost most in iq4_nl then get int8 (`onward.quantization.budget`).
        progress: called with each matrix's report, in order. A tied pair has one report.
        calibrate: round with error feedback on text, such as `onward.quantization.Calibration()`: the same bytes with
            less error, for minutes of work (docs/quantization.md). By default each matrix is rounded to nearest.

    Raises:
        RequestError: another format, a model of no built-in family, a model that is quantized already, or weights that
            are not finite. A forward of your own can call `ops.linear` with weights from `quantize_weight`.
    """
    check_quantizing(format, calibrate)
    lm = model if isinstance(model, LanguageModel) else LanguageModel(model)
    small = replace(lm.model, params=quantized_params(lm, format, calibrate, progress)[0])
    return lm.with_model(small) if isinstance(model, LanguageModel) else small


def check_quantizing(format: object, calibrate: object) -> None:
    """Raise `RequestError` unless these are arguments of `quantize`, before a model is read for nothing."""
    if isinstance(format, str):
        check_format(format)
    elif not is_finite(format):
        raise RequestError(f"weights are quantized to {rounded_formats()}, or to so many bits a weight; got {format!r}")
    if not isinstance(calibrate, Calibration | None):
        raise RequestError(f"calibrate is an onward.quantization.Calibration, or None; got {calibrate!r}")


def quantized_params(
    lm: LanguageModel,
    format: str | float,
    calibrate: Calibration | None,
    progress: Progress | None = None,
    show_fraction: Callable[[float], None] = lambda fraction: None,
    release: Callable[[], None] = lambda: None,
) -> tuple[Any, list[TensorReport]]:
    """The params of a model, quantized, and a report of each matrix. Arguments are those of `quantize`.

    show_fraction: is called with the fraction of the matrices that is measured, and then again of those that are done.
    release: as for `quantize_params`.
    """
    params = lm.model.params
    if not marked_parts(params):
        raise RequestError(
            f"quantize finds matrices by their types, Linear and Embedding; got a model whose params are "
            f"{type(params).__name__}, without any: make its weights with quantize_weight"
        )

    def report(done: TensorReport) -> None:
        if progress is not None:
            progress(done)
        show_fraction(quantizer.fraction)

    if calibrate is None and isinstance(format, str):
        quantizer = ParamsQuantizer(params, format, report, release)
        return quantizer.quantized(params), quantizer.reports
    ids = calibration_ids(lm, MEASURED if calibrate is None else calibrate)
    formats = format if isinstance(format, str) else choose_formats(lm.model, ids, format, show_fraction)
    quantizer = ParamsQuantizer(params, formats, report)
    if calibrate is None:
        return quantizer.quantized(params), quantizer.reports
    return calibrated_params(lm.model, ids, quantizer), quantizer.reports
