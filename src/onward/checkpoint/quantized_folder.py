"""Folders of quantized weights: a Hugging Face checkpoint whose matrices are packed bytes.

config.json describes them under "onward_quantization". model.safetensors holds the matrices under their stock names as
uint8 [blocks, bytes], aligned to 64 bytes, so that the kernels read the mapped file directly.
docs/quantized-checkpoints.md describes both.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import models
from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.formats import FIELDS_OF_METHODS
from onward.checkpoint.safetensors import SafetensorsFolder
from onward.checkpoint.shards import TEXT_FILES, WEIGHTS, page_releaser
from onward.errors import CheckpointError, ConfigError, RequestError
from onward.native import advise_huge_pages
from onward.native.machine import ENOUGH_HUGE_PAGES, file_mappings, read_in_huge_pages
from onward.ops import NativeWeight, QuantizedWeight, Weight
from onward.ops.linear import stock_weight, weight_shape
from onward.ops.packed import packed_shape
from onward.ops.quantized import ROUNDED_FORMATS, rounded_formats
from onward.ops.quantized_layout import GROUP, data_shape
from onward.prefix_store.file_system import FileSystem
from onward.util.files import appears, check_destination

MANIFEST = "onward_quantization"
# One format for all matrices; one for each.
VERSION, MIXED_VERSION = 1, 2
ALIGNMENT = 64
# Of floats in the kernels' layout, which only a copy in the cache folder has.
PACKED = "packed"

_PIECE = 64 << 20  # bytes that are written at once
_RELEASED_NBYTES = 64 << 20  # of matrices, between releases of the file's pages
_COPIED = (*TEXT_FILES, "LICENSE")
_DTYPES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Manifest:
    """The quantized matrices in a config.json: stock name -> the shape (N, K) of the weight, and its format."""

    shapes: Mapping[str, tuple[int, int]]
    formats: Mapping[str, str]

    @property
    def format(self) -> str:
        """The common format, or all of them: "int4 and int8"."""
        return " and ".join(sorted(set(self.formats.values())))


def read_manifest(folder: Path, config: Mapping[str, Any], *, of_copy: bool = False) -> Manifest | None:
    """The manifest in a config.json, if it has one. of_copy: of `write_copy`, which may have packed floats."""
    manifest = config.get(MANIFEST)
    if manifest is None:
        return None
    where = f"{folder}: config.json: {MANIFEST}"
    if not isinstance(manifest, dict):
        raise ConfigError(f"{where} must be an object; got {manifest!r}: quantize the checkpoint again")
    version = manifest.get("version")
    if not (_equals_int(version, VERSION) or _equals_int(version, MIXED_VERSION)):
        raise ConfigError(
            f"{where} is version {version!r}, and this Onward reads versions {VERSION} and {MIXED_VERSION}: "
            "quantize the checkpoint again with this one, or use the Onward that wrote it"
        )
    if version == VERSION:
        _check_format(where, manifest.get("format"), manifest, of_copy)
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict) or not tensors:
        raise ConfigError(f"{where}: 'tensors' must map names to {{'shape': [N, K]}}; got {tensors!r}")
    shapes = {name: _shape(f"{where}: {name}", entry) for name, entry in tensors.items()}
    formats: dict[str, Any] = {
        name: (manifest if version == VERSION else entry).get("format") for name, entry in tensors.items()
    }
    if version == MIXED_VERSION:
        for name, format in formats.items():
            _check_format(f"{where}: {name}", format, manifest, of_copy)
    return Manifest(shapes, formats)


def _check_format(where: str, format: Any, manifest: Mapping[str, Any], of_copy: bool) -> None:
    if of_copy and format == PACKED:
        return
    if not isinstance(format, str) or format not in ROUNDED_FORMATS:
        raise ConfigError(f"{where}: format must be {rounded_formats()}; got {format!r}")
    if format != "int8" and not _equals_int(manifest.get("group"), GROUP):
        raise ConfigError(f"{where}: {format} requires group {GROUP}; got {manifest.get('group')!r}")


def _equals_int(value: Any, number: int) -> bool:
    """Whether a JSON value is this integer: 1.0 and true are not 1, though they compare equal."""
    return type(value) is int and value == number


def _shape(where: str, entry: Any) -> tuple[int, int]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ConfigError(f"{where} must have a 'shape' of two sizes; got {shape!r}")
    return shape[0], shape[1]


class QuantizedTensors(SafetensorsFolder):
    """Reads the matrices in the manifest as `QuantizedWeight`s or `NativeWeight`s of the mapped file, and all other
    tensors unchanged. dtype: of norms, biases and activations; None: that of `Architecture.float_tensor`.

    mapped: whether the matrices stay in the mapped file even if the system maps it in small pages. Otherwise they are
    then copied into huge pages, from which the kernels read faster."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        dtype: torch.dtype | None,
        device: torch.device,
        config: models.Architecture,
        *,
        mapped: bool = True,
    ) -> None:
        super().__init__(folder, dtype, device)
        self._manifest = manifest
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder / WEIGHTS} is missing: it holds all weights; quantize the checkpoint again")
        ranges = file_mappings({os.fsencode((folder / WEIGHTS).resolve())})
        if mapped:
            for each in ranges:
                advise_huge_pages(*each)
        self._mapped = mapped or any(read_in_huge_pages(*each) >= ENOUGH_HUGE_PAGES for each in ranges)
        self._release, self._unreleased = page_releaser(folder), 0
        self.dtype = dtype or self.take(*config.float_tensor).dtype

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Weight:
        if name not in self._manifest.shapes:
            if (packed := self.find(name)) is not None and packed.dtype == torch.uint8:
                raise CheckpointError(
                    f"{self._folder}: tensor {name!r} is packed bytes, but {MANIFEST} has no entry with its shape: "
                    "quantize the checkpoint again"
                )
            return super().take(name, shape, dtype)
        own, format = self._manifest.shapes[name], self._manifest.formats[name]
        if own != shape:
            shapes = f"has shape {list(own)}, but config.json expects {list(shape)}"
            raise CheckpointError(f"{self._folder}: {MANIFEST}: tensor {name!r} {shapes}")
        if (data := self.find(name)) is None:
            raise CheckpointError(f"{self._folder}: tensor {name!r} of {MANIFEST} is missing from {WEIGHTS}")
        assert self.dtype is not None
        is_packed = format == PACKED
        stored_dtype = self.dtype if is_packed else torch.uint8
        expected_shape = packed_shape(*own, self.dtype) if is_packed else data_shape(format, own)
        if data.dtype != stored_dtype or tuple(data.shape) != expected_shape:
            raise CheckpointError(
                f"{self._folder / WEIGHTS}: tensor {name!r} is {data.dtype} {list(data.shape)}, but {format} packs "
                f"{list(shape)} into {stored_dtype} {list(expected_shape)}: quantize the checkpoint again"
            )
        self._consumed.add(name)
        data = self._placed(data)
        return NativeWeight(data, *own) if is_packed else QuantizedWeight(data, format, own, self.dtype)

    def _placed(self, data: Tensor) -> Tensor:
        """The data of a matrix where the kernels read it."""
        if not self._mapped:
            copy = torch.empty_like(data)
            advise_huge_pages(copy.data_ptr(), copy.nbytes)
            copy.copy_(data)
            self._unreleased += copy.nbytes
            if self._unreleased >= _RELEASED_NBYTES:
                self._release()
                self._unreleased = 0
            return copy
        # The kernels read whole cache lines, so data that another writer did not align is copied.
        return (data.clone() if data.data_ptr() % ALIGNMENT else data).to(self._device)

    def unread(self) -> list[str]:
        return sorted({*self._manifest.shapes, *super().unread()} - self._consumed)


def write_quantized(
    source: CheckpointFolder,
    config: models.Architecture,
    params: Any,
    destination: Path,
    errors: Mapping[str, float] | None = None,
) -> None:
    """Write quantized weights as a checkpoint, with the source's tokenizer, templates and defaults, atomically. Other
    matrices of `params` are stored unchanged. errors: relative RMS errors by `parameter_name`, for the manifest."""
    destination = destination.absolute()
    check_destination(destination)
    weights = _checked_formats(weights_by_stock_name(config, params))
    if not _formats(weights):
        raise RequestError("a quantized folder holds quantized weights; got none")
    with appears(destination) as partial:
        partial.mkdir()
        copy_small_files(source.path, partial)
        places, _ = pytree.tree_flatten_with_path(models.named_params(config))
        by_name = {name: (errors or {}).get(models.parameter_name(path)) for path, name in reversed(places)}
        manifest = {MANIFEST: _manifest(weights, by_name)}
        write_json(partial / "config.json", without_quantization(source.config) | manifest)
        write_safetensors(_data(weights), partial / WEIGHTS)


def write_copy(config: models.Architecture, params: Any, folder: Path) -> None:
    """Write quantized and packed weights alone, with their manifest in a config.json; the caller makes them durable.
    Raises `RequestError` for weights in other formats."""
    weights = _checked_formats(_named_weights(config, params, packed=True))
    write_json(folder / "config.json", {MANIFEST: _manifest(weights, {})})
    write_safetensors(_data(weights), folder / WEIGHTS, durable=False)


def _checked_formats(weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """The weights, if they have formats that a folder holds."""
    if others := _formats(weights) - {*ROUNDED_FORMATS, PACKED}:
        raise RequestError(f"a quantized folder can only store weights in {rounded_formats()}; got {sorted(others)}")
    return weights


def _format(weight: Weight) -> str | None:
    """The format in a manifest; None for weights in rows."""
    return PACKED if isinstance(weight, NativeWeight) else getattr(weight, "format", None)


def _formats(weights: Mapping[str, Weight]) -> set[str]:
    return {format for weight in weights.values() if (format := _format(weight)) is not None}


def _data(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    return {name: weight if isinstance(weight, Tensor) else weight.data for name, weight in weights.items()}


def weights_by_stock_name(config: models.Architecture, params: Any) -> dict[str, Tensor | QuantizedWeight]:
    """Stock name -> weight, for stock or quantized params; a tied weight appears once, under one name."""
    named = _named_weights(config, params, packed=False)
    return {name: weight for name, weight in named.items() if not isinstance(weight, NativeWeight)}


def _named_weights(config: models.Architecture, params: Any, *, packed: bool) -> dict[str, Weight]:
    """`weights_by_stock_name`, with weights in the kernels' layout if `packed`."""
    names = pytree.tree_leaves(models.named_params(config))
    params = models.map_marked(lambda path, part: _as_stored(part), params)
    weights = pytree.tree_leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight | NativeWeight))
    named: dict[str, Weight] = {}
    for name, weight in zip(names, weights, strict=True):
        if name is None:
            continue
        if isinstance(weight, NativeWeight) and not packed:
            raise RequestError(f"{name} is packed for this machine only: quantize it, or pass its stock weight")
        if named.setdefault(name, weight) is not weight:
            raise RequestError(f"config.json ties {name} to another weight, but they differ in the params")
    return named


def _as_stored(part: Any) -> Any:
    """Weights in a checkpoint's form: one per expert, latent projections whole, never-quantized ones unpacked."""
    if isinstance(part, models.LatentLinear):
        return replace(part, weight=part.stock)
    if isinstance(part, models.Router) and isinstance(part.weight, NativeWeight):
        return part._replace(weight=stock_weight(part.weight))
    if isinstance(part, models.ShortConv):
        return part._replace(weight=part.by_tap.T.unsqueeze(1))
    return part._replace(weight=part.matrices) if isinstance(part, models.ExpertLinear) else part


def copy_small_files(source: Path, destination: Path) -> None:
    for name in _COPIED:
        if (source / name).is_file():
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, destination / name)


def _manifest(weights: Mapping[str, Weight], errors: Mapping[str, float | None]) -> dict[str, Any]:
    """errors: relative RMS errors by stock name."""
    tensors: dict[str, Any] = {}
    formats = _formats(weights)
    is_mixed = len(formats) > 1
    for name, weight in weights.items():
        if (format := _format(weight)) is not None:
            tensors[name] = {"shape": list(weight_shape(weight))}
            tensors[name] |= {"format": format} if is_mixed else {}
            tensors[name] |= (
                {} if (error := errors.get(name)) is None else {"relative_rms_error": float(f"{error:.4g}")}
            )
    version = {"version": MIXED_VERSION} if is_mixed else {"version": VERSION, "format": next(iter(formats))}
    group = {"group": GROUP} if formats - {"int8", PACKED} else {}
    return version | group | {"tensors": tensors}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the description of another library's quantization."""
    left = {name: value for name, value in config.items() if name not in FIELDS_OF_METHODS}
    text = left.get("text_config")
    return left | ({"text_config": without_quantization(text)} if isinstance(text, dict) else {})


def write_safetensors(tensors: Mapping[str, Tensor], file: Path, *, durable: bool = True) -> None:
    """Write a safetensors file; if `durable`, return when it is on the disk. Tensors whose length is a multiple of 64
    bytes are aligned to 64 bytes, which `safetensors.torch.save_file` does not guarantee."""
    # Other tensors come last, wide elements first, so that each is aligned to its element size.
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, -tensors[name].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    data = (tensors[name].contiguous().view(torch.uint8).numpy().data for name in order)
    with file.open("wb", buffering=0) as out:
        _write_in_pieces(out.fileno(), itertools.chain([len(text).to_bytes(8, "little") + text], data))
        if durable:
            os.fsync(out.fileno())


def _write_in_pieces(handle: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write parts in pieces of whole huge pages, so that the system can keep the file in huge pages."""
    piece: list[memoryview] = []
    room = _PIECE
    for part in parts:
        left = memoryview(part).cast("B")
        while left.nbytes:
            piece.append(left[:room])
            left, room = left[room:], room - piece[-1].nbytes
            if room == 0:
                FileSystem().write(handle, piece)
                piece, room = [], _PIECE
    FileSystem().write(handle, piece)
