"""Quantization of models and checkpoints."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from onward.checkpoint import CheckpointFolder, find_folder, page_releaser, read_weights
from onward.checkpoint.gguf import is_gguf
from onward.checkpoint.quantized_folder import read_manifest, write_quantized
from onward.errors import RequestError
from onward.language_model.generation_config import generation_defaults, within_vocabulary
from onward.language_model.language_model import LanguageModel
from onward.language_model.quantize_mixed import (
    MEASURED,
    Calibration,
    calibrated_params,
    calibration_ids,
    choose_formats,
)
from onward.models import Model, build_model, marked_parts, pack_params, read_config
from onward.ops.quantized import rounded_formats
from onward.quantization.params import ParamsQuantizer, Progress, TensorReport
from onward.quantization.rounding import check_format
from onward.util.checks import is_finite
from onward.util.files import check_destination
from onward.util.option_names import checks_option_names

_ModelT = TypeVar("_ModelT", Model, LanguageModel)


@checks_option_names
def quantize(
    model: _ModelT, format: str | float, *, progress: Progress | None = None, calibrate: Calibration | None = None
) -> _ModelT:
    """Quantize all matrices of a model to 8 or 4 bits, including the embedding and the head.

    Norms, biases, short convolutions, the routers of experts and the matrices of latents (MLA's `kv_b_proj`) stay. The
    original model is not changed; drop it to free its weights.

    Args:
        model: a `LanguageModel` or a `Model` of a built-in family, as loaded.
        format: "int8" (a scale for each row), "int4" or "iq4_nl" (a scale for each 32 inputs of a row, for whole
            numbers or for the table of IQ4_NL, which is more accurate); or a number, the maximum average of bits per
            weight: the matrices that cost most in iq4_nl then get int8 (`onward.language_model.quantize_mixed`).
        progress: called with each matrix's report, in order. A tied pair has one report.
        calibrate: round with error feedback on text, such as `onward.language_model.Calibration()`: the same size with
            a smaller error, but minutes of work (docs/calibration.md). By default matrices are rounded to nearest.

    Raises:
        RequestError: another format, a model of no built-in family, a quantized model, or weights that are not finite.
            For a forward of your own, call `ops.linear` with weights from `quantize_weight`.
    """
    check_quantizing(format, calibrate)
    lm = model if isinstance(model, LanguageModel) else LanguageModel(model)
    small = replace(lm.model, params=quantized_params(lm, format, calibrate, progress)[0])
    quantized: Any = lm.with_model(small) if isinstance(model, LanguageModel) else small
    return cast(_ModelT, quantized)


def check_quantizing(format: object, calibrate: object) -> None:
    if isinstance(format, str):
        check_format(format)
    elif not is_finite(format):
        raise RequestError(f"the format must be {rounded_formats()}, or a number of bits per weight; got {format!r}")
    if not isinstance(calibrate, Calibration | None):
        raise RequestError(f"calibrate must be an onward.language_model.Calibration or None; got {calibrate!r}")


def quantized_params(
    lm: LanguageModel,
    format: str | float,
    calibrate: Calibration | None,
    progress: Progress | None = None,
    show_fraction: Callable[[float], None] = lambda fraction: None,
    release: Callable[[], None] = lambda: None,
) -> tuple[Any, list[TensorReport]]:
    """The quantized params of a model, and a report for each matrix. show_fraction: called with the fraction of
    matrices measured and then quantized. The other arguments are those of `quantize` and `quantize_params`."""
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


def quantize_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: str | float,
    *,
    progress: Progress | None = None,
    show_downloads: bool = False,
    show_fraction: Callable[[float], None] = lambda fraction: None,
    calibrate: Calibration | None = None,
) -> list[TensorReport]:
    """Quantize a checkpoint into a folder that `onward.load` maps into memory, and return a report for each matrix.

    Args:
        source: a folder, a hub id or "demo", as for `onward.load`.
        destination: an absent or empty folder, written atomically.
        format, progress, calibrate: as for `onward.quantize`.
        show_downloads: show progress bars for downloads.
        show_fraction: called after each matrix with the fraction of quantized matrices, from 0 to 1; with a limit of
            bits, first with that of measured ones.
    """
    check_quantizing(format, calibrate)
    target = Path(destination).expanduser()
    check_destination(target)
    path = find_folder(source if isinstance(source, str) else Path(source), progress=show_downloads)
    if is_gguf(path):
        raise RequestError(
            f"{path} is a GGUF file, and only folders can be quantized: run onward convert --to safetensors first, or "
            "pass quantize= to onward.load"
        )
    folder = CheckpointFolder(path)
    if (manifest := read_manifest(path, folder.config)) is not None:
        raise RequestError(f"{path} is already {manifest.format}: quantize the original checkpoint")
    config = read_config(folder.config)
    params = read_weights(path, config, dtype=None, device=torch.device("cpu"))
    release = page_releaser(path)
    if calibrate is None and isinstance(format, str):
        lm = LanguageModel(build_model(config, params))
    else:
        lm = _writer(folder, build_model(config, pack_params(params, release=release)))
    params, reports = quantized_params(lm, format, calibrate, progress, show_fraction, release)
    errors = {report.name: report.relative_rms_error for report in reports}
    write_quantized(folder, config, params, target, errors)
    return reports


def _writer(folder: CheckpointFolder, model: Model) -> LanguageModel:
    path, tokenizer = folder.path, folder.tokenizer
    defaults = generation_defaults(
        folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=path, file=folder.generation_file
    )
    tokenizer = None if tokenizer is None else tokenizer.within(path, model.vocab_size)
    return LanguageModel(model, tokenizer, defaults=within_vocabulary(defaults, model.vocab_size, path))
