"""Quantize a checkpoint folder into another folder."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from onward.checkpoint import CheckpointFolder, find_folder, page_releaser, read_weights
from onward.checkpoint.destination import check_destination
from onward.checkpoint.gguf import is_gguf
from onward.checkpoint.quantized import read_manifest, write_quantized
from onward.errors import RequestError
from onward.language_model import LanguageModel
from onward.models import Model, build_model, pack_params, read_config
from onward.quantization.calibration import Calibration
from onward.quantization.model import check_quantizing, quantized_params
from onward.quantization.params import Progress, TensorReport
from onward.requests import generation_defaults, within_vocabulary


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
    """Quantize a checkpoint into a folder that `onward.load` maps into memory.

    Args:
        source: a folder, a hub id or "demo", as for `onward.load`.
        destination: a folder that is absent or empty. It appears when all is written, or not at all.
        format: "int8", "int4" or "iq4_nl", or a number, the most bits a weight on average (`onward.quantize`).
        progress: called after each matrix with its report.
        show_downloads: show bars while a hub id is fetched.
        show_fraction: called after each matrix with the fraction that is done, from 0 to 1; where a budget of bits is
            spent, first with that of the matrices that are measured.
        calibrate: as for `onward.quantize`.

    Returns:
        The report of each matrix.
    """
    check_quantizing(format, calibrate)
    target = Path(destination).expanduser()
    check_destination(target)
    path = find_folder(source if isinstance(source, str) else Path(source), progress=show_downloads)
    if is_gguf(path):
        raise RequestError(
            f"{path} is GGUF, in types of its own: make a folder of it with onward convert --to safetensors, or give "
            "quantize= to onward.load"
        )
    folder = CheckpointFolder(path)
    if (manifest := read_manifest(path, folder.config)) is not None:
        raise RequestError(f"{path} is {manifest.format} already: quantize the checkpoint that it was made from")
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
    """The model of a folder, as far as it takes to write texts."""
    path, tokenizer = folder.path, folder.tokenizer
    defaults = generation_defaults(
        folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=path, file=folder.generation_file
    )
    tokenizer = None if tokenizer is None else tokenizer.within(path, model.vocab_size)
    return LanguageModel(model, tokenizer, defaults=within_vocabulary(defaults, model.vocab_size, path))
