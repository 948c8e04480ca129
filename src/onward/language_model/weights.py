"""Loading of weights: read, merged with an adapter, quantized, packed for the kernels; and the draft head that
`load(…, draft=)` names, with its weights."""

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch

from onward.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    GgufCheckpoint,
    find_folder,
    open_checkpoint,
    page_releaser,
    read_weights,
)
from onward.checkpoint.dcp import NameMapSource, is_distributed
from onward.checkpoint.formats import methods_of
from onward.checkpoint.quantized_folder import read_manifest
from onward.checkpoint.weights import read_head
from onward.decoding.speculation import LOOKUPS
from onward.errors import RequestError, UnsupportedArchitectureError, warn
from onward.language_model.weights_copy import WeightsCopy
from onward.models import Architecture, Model, pack_layer, pack_params, stack_params
from onward.models.adapters import Adapter, merged_params
from onward.models.heads import DraftHead, HeadParams, head_reader, read_mtp
from onward.models.key_balance import balanced_keys
from onward.ops.kv_format import KVFormat
from onward.quantization import TensorReport, count_matrices, quantize_params

# Seconds after which a progress bar appears.
_BAR_DELAY_S = 1.0
# The number of weights between releases of the file's pages: a release takes as long as quantizing half a million.
_RELEASED_AFTER = 16_000_000


class LayersInPlace:
    """The progress of loading layers. show: draw a bar on stderr after a second. tell: called with the fraction."""

    def __init__(self, count: int, show: bool, tell: Callable[[float], None] | None) -> None:
        self._count, self._done, self._tell = count, 0, tell
        self._bar: Any = None
        if show:
            from huggingface_hub.utils.tqdm import tqdm  # takes a tenth of a second

            self._bar = tqdm(total=count, desc="Loading weights", unit="layer", delay=_BAR_DELAY_S, leave=False)  # type: ignore[no-untyped-call]

    def __enter__(self) -> "LayersInPlace":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Count a layer. Further calls after the last one, such as for the head, do nothing."""
        if self._done == self._count:
            return
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        if self._tell is not None:
            self._tell(self._done / self._count)


@dataclass(frozen=True)
class WeightsReader:
    """Reads the params of a model. The fields are options of `load`. copy: of the weights as this reads them."""

    checkpoint: Checkpoint
    architecture: Architecture
    dtype: torch.dtype | None
    device: torch.device
    format: str | None
    name_map: NameMapSource
    adapter: Adapter | None
    layers: LayersInPlace
    cache_format: KVFormat | None = None
    copy: WeightsCopy | None = None

    def read(self) -> Any:
        """The params: quantized if the checkpoint or the caller says so, else packed for the kernels on a CPU. Their
        keys are balanced for a cache in another format than floats."""
        params = None if self.copy is None else self.copy.read(self.architecture)
        if params is not None:
            params = pack_params(params, release=self.layers.advance)
        else:
            params = self._read()
            if self.copy is not None:
                self.copy.write(self.architecture, params)
        return params if self.cache_format is None else balanced_keys(self.architecture, params)

    def _read(self) -> Any:
        checkpoint, path = self.checkpoint, self.checkpoint.path
        common: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if isinstance(checkpoint, GgufCheckpoint):
            self._reject("GGUF", next((name for name in checkpoint.types if name not in ("F32", "F16", "BF16")), None))
            # Each layer is packed, and its pages are released, before the next is read.
            release = checkpoint.page_releaser()
            each_layer = self._layer_by_layer(release)
            return self._finished(
                checkpoint.read_weights(self.architecture, each_layer=each_layer, **common), self.format, release
            )
        if (manifest := read_manifest(path, checkpoint.config)) is None:
            return self._read_stock()
        self._reject("quantized", None if self.format == manifest.format else manifest.format)
        return self._finished(read_weights(path, self.architecture, manifest=manifest, **common), None, lambda: None)

    def _read_stock(self) -> Any:
        path, config = self.checkpoint.path, self.checkpoint.config
        methods = methods_of(config)
        # Adapters are merged into floats, and floats are quantized. Experts in MXFP4 are left as they are.
        can_keep = methods is not None and (methods.name == "mxfp4" or (self.format is None and self.adapter is None))
        keeps_bits = can_keep and self.dtype != torch.float32 and self.device.type == "cpu"
        # Weights that are not mapped (a distributed checkpoint, repacked bits) are built layer by layer, so that memory
        # holds them once.
        lean = self.device.type == "cpu" and (keeps_bits or (is_distributed(path) and self.format is None))
        release = page_releaser(path)
        params = read_weights(
            path,
            self.architecture,
            dtype=self.dtype,
            device=self.device,
            name_map=self.name_map,
            each_layer=self._layer_by_layer(release) if lean else lambda layer: layer,
            keeps_bits=keeps_bits,
            show_in_floats=self._warn_of_floats,
        )
        return self._finished(params, self.format, release, keep=keeps_bits)

    def _warn_of_floats(self, modules: list[str]) -> None:
        if not modules or self.format is not None:
            return
        methods = methods_of(self.checkpoint.config)
        assert methods is not None, "modules are quantized"
        warn(
            f"{self.checkpoint.path}: {len(modules)} weights quantized by {methods.name} become floats as "
            f"they are read (such as {modules[0]}), and so do activations: quantize='int8' or 'iq4_nl' stores them in "
            "fewer bits"
        )

    def _layer_by_layer(self, release: Callable[[], None]) -> Callable[[Any], Any]:
        """The processing of a layer before the next one is read. release: frees the file's pages."""

        def place(layer: Any) -> Any:
            placed = pack_layer(layer) if self.format is None and self.device.type == "cpu" else stack_params(layer)
            release()
            self.layers.advance()
            return placed

        return place

    def _finished(self, params: Any, format: str | None, release: Callable[[], None], *, keep: bool = False) -> Any:
        """Merge, then quantize, then pack. keep: leave matrices that are quantized already."""
        if self.adapter is not None:
            params = merged_params(self.architecture, params, self.adapter)

        def after_layer() -> None:
            release()
            self.layers.advance()

        if format is not None:
            params = quantize_params(params, format, progress=self._after_matrix(params, release), keep=keep)[0]
        return pack_params(params, release=after_layer) if self.device.type == "cpu" else stack_params(params)

    def _after_matrix(self, params: Any, release: Callable[[], None]) -> Callable[[TensorReport], None]:
        """Counts layers by their quantized matrices, which come in order, after the embedding."""
        ends = set(itertools.accumulate((count_matrices(layer) for layer in params.layers), initial=1))
        done, unreleased = itertools.count(1), 0

        def after_matrix(report: TensorReport) -> None:
            nonlocal unreleased
            unreleased += report.shape[0] * report.shape[1]
            if unreleased >= _RELEASED_AFTER:
                release()
                unreleased = 0
            if next(done) in ends:
                self.layers.advance()

        return after_matrix

    def _reject(self, kind: str, own_format: str | None) -> None:
        """Raise `RequestError` for options that another kind of checkpoint does not have."""
        path = self.checkpoint.path
        if self.name_map is not None:
            raise RequestError(
                f"a name map is for a folder of safetensors or of torch.distributed.checkpoint in floats, but {path} "
                f"is {kind}"
            )
        if self.format is not None and own_format is not None:
            raise RequestError(f"{path} is already quantized ({own_format}): load it without quantize={self.format!r}")


def is_draft_source(draft: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether `draft=` names a checkpoint, of a head or of a smaller model."""
    return isinstance(draft, os.PathLike) or (isinstance(draft, str) and draft not in LOOKUPS)


def refuse_head(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedArchitectureError` for a head in place of a model."""
    if head_reader(config) is not None:
        raise UnsupportedArchitectureError("this is a draft head, not a model: load its model with it as draft=")


def find_head(draft: Any, folder: Checkpoint, config: Architecture | None, show: bool) -> tuple[DraftHead, Path] | None:
    """The head that `draft` names, and the folder with its weights; None for another drafter."""
    if not is_draft_source(draft):
        return None
    if draft == "mtp":
        if not isinstance(folder, CheckpointFolder):
            raise RequestError(f"draft='mtp' needs a folder of safetensors, and {folder.path} is not one")
        return read_mtp(config), folder.path
    source = open_checkpoint(find_folder(draft, progress=show))
    read = head_reader(source.config) if isinstance(source, CheckpointFolder) else None
    return None if read is None else (read(source.config, config), source.path)


def read_draft_head(head: DraftHead, folder: Path, model: Model, format: str | None) -> HeadParams:
    """The weights of a head in the dtype of its model, quantized as the model is, or packed on a CPU."""
    params = read_head(folder, head, model.params.norm.dtype, model.device)
    if format is not None:
        return cast(HeadParams, quantize_params(params, format)[0])
    return cast(HeadParams, pack_layer(params) if model.device.type == "cpu" else params)
