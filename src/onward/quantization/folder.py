"""Quantize a checkpoint folder into another folder."""

import os
from pathlib import Path

import torch

from onward.checkpoint import CheckpointFolder, find_folder, page_releaser, read_weights
from onward.checkpoint.quantized import check_destination, read_manifest, write_quantized
from onward.errors import RequestError
from onward.models import read_config
from onward.quantization.params import Progress, TensorReport, quantize_params
from onward.quantization.rounding import check_format


def quantize_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: str,
    *,
    progress: Progress | None = None,
    show_downloads: bool = False,
) -> list[TensorReport]:
    """Quantize a checkpoint into a folder that `onward.load` maps into memory.

    Args:
        source: a folder, a hub id or "demo", as for `onward.load`.
        destination: a folder that is absent or empty. It appears when all is written, or not at all.
        format: "int8" or "int4".
        progress: called after each matrix with its report.
        show_downloads: show bars while a hub id is fetched.

    Returns:
        The report of each matrix.
    """
    check_format(format)
    target = Path(destination).expanduser()
    check_destination(target)
    path = find_folder(source if isinstance(source, str) else Path(source), progress=show_downloads)
    folder = CheckpointFolder(path)
    if (manifest := read_manifest(path, folder.config)) is not None:
        raise RequestError(f"{path} is {manifest.format} already: quantize the checkpoint that it was made from")
    config = read_config(folder.config)
    stock = read_weights(path, config, dtype=None, device=torch.device("cpu"))
    params, reports = quantize_params(stock, format, progress=progress, release=page_releaser(path))
    errors = {report.name: report.relative_rms_error for report in reports}
    write_quantized(folder, config, params, target, errors)
    return reports
