"""Load a language model, ready to decode, from a folder, a hub id or a name."""

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import tqdm

from onward.adapters import Adapter, merged_params, read_adapter
from onward.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    GgufCheckpoint,
    Tokenizer,
    find_adapter,
    find_folder,
    open_checkpoint,
    page_releaser,
    read_weights,
)
from onward.checkpoint.distributed import NameMapSource, is_distributed
from onward.checkpoint.module import is_known, read_module
from onward.checkpoint.quantized import read_manifest, read_quantized
from onward.checkpoint.quantizers import Mxfp4, method_of
from onward.checks import check_whole
from onward.errors import CheckpointError, ConfigError, RequestError, UnsupportedArchitectureError, warn
from onward.language_model import LanguageModel
from onward.messages import MessageFormat, checked_format
from onward.models import (
    Architecture,
    Model,
    build_model,
    check_backend,
    pack_layer,
    pack_params,
    read_config,
    stack_params,
)
from onward.models.hosted import host
from onward.native import isa
from onward.quantization import TensorReport, check_format, count_matrices, quantize_params
from onward.requests import LOOKUPS, Draft, generation_defaults

# A bar is drawn for what takes longer.
_BAR_DELAY_S = 1.0

_log = logging.getLogger(__name__)

_VIA = ("auto", "onward", "transformers")
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}


def load(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "auto",
    max_seq_len: int | None = None,
    progress: bool | Callable[[float], None] | None = None,
    quantize: str | None = None,
    name_map: NameMapSource = None,
    compile: str = "auto",
    draft: Draft | os.PathLike[str] | None = None,
    message_format: str | MessageFormat | None = None,
    merge: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    via: str = "auto",
) -> LanguageModel:
    """Load a model, its tokenizer, its chat template and its defaults.

    Weights are mapped from their files. On a CPU each matrix is then packed into the layout that the kernels read
    fastest, and the file's pages are released, so that memory holds the weights once.

    Args:
        source: a folder in the Hugging Face layout; a GGUF file (docs/gguf.md); a folder that
            torch.distributed.checkpoint wrote, with a config.json added; a hub id ("Qwen/Qwen3-0.6B", optionally with
            "@revision", and with ":file.gguf"); or "demo", the model that comes with the package.
        dtype: "bfloat16", "float16", "float32" or a torch dtype; the checkpoint's own by default.
        device: "auto" (CUDA where there is one), "cpu", "cuda", …
        max_seq_len: the most positions a request may use; the checkpoint's max_position_embeddings by default.
        progress: show downloads, and how much of the weights is in place where that takes long; by default only on a
            terminal. A function is called with that fraction, from 0 to 1, after each layer, for a display of your own.
        quantize: "int8" or "int4" holds all matrices in 8 or 4 bits (docs/quantization.md). A folder that
            `quantize_folder` wrote is quantized already.
        name_map: from the trainer's names of weights to Hugging Face's, for a torch.distributed.checkpoint folder: a
            JSON file or a mapping (docs/training.md). By default it is the folder's name_map.json, if any.
        compile: what runs the model: "auto", "native", "cuda", "inductor" or "eager" (docs/programs.md).
        draft: what guesses the next tokens (docs/speculation.md): "lookup", "suffix", or a smaller model of the same
            vocabulary. The model is loaded already, or a source to load with the same dtype, device and quantization
            ("demo-draft" for "demo").
        message_format: how the model writes reasoning and calls of tools, where the chat template does not tell:
            "hermes", "llama3", "mistral", "mistral-args", "plain" or a `MessageFormat` (docs/chat.md).
        merge: an adapter, a folder that peft wrote or a hub id of one, to merge into the weights before they are
            quantized (docs/adapters.md).
        adapters: by name, those that requests may name (`LanguageModel.load_adapter`): folders that peft wrote, or hub
            ids.
        via: whose forward runs: "onward" (a family of ours), "transformers" (its own, over our weights, attention and
            caches, docs/transformers.md), or "auto": the family, and where there is none, transformers if it is
            installed.

    Raises:
        SourceError: no such folder or repository. ConfigError: config.json or generation_config.json cannot be
        used. CheckpointError: the weights or the tokenizer do not fit config.json. TokenizerError: the tokenizer or
        the chat template cannot be read. RequestError: a bad argument.
    """
    began = time.perf_counter()
    if max_seq_len is not None:
        check_whole("max_seq_len", max_seq_len, low=1)
    if quantize is not None:
        check_format(quantize)
    check_backend(compile)
    if via not in _VIA:
        raise RequestError(f"via is one of {', '.join(_VIA)}; got {via!r}")
    checked_format(message_format)
    torch_dtype, torch_device = _as_dtype(dtype), _as_device(device)
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    show_fraction = progress if callable(progress) else None
    show = on_terminal if progress is None or show_fraction is not None else bool(progress)
    path = find_folder(_as_source(source), progress=show)
    adapter = None if merge is None else read_adapter(find_adapter(_as_source(merge), progress=show))
    folder = open_checkpoint(path)
    tokenizer, template = folder.tokenizer, folder.chat_template
    defaults = generation_defaults(folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=path)
    config = _family(folder, via)
    if config is None:
        if name_map is not None or adapter is not None:
            raise RequestError("name_map= and merge= are for the families of Onward, and transformers runs this model")
        model = _read_hosted(folder, torch_dtype, torch_device, quantize, max_seq_len)
        _check_vocabulary(path, model.vocab_size, tokenizer, folder.eos)
    else:
        context = _context(config, max_seq_len)
        _check_vocabulary(path, config.vocab_size, tokenizer, folder.eos)
        with _Layers(len(config.layers), show and show_fraction is None, show_fraction) as layers:
            params = _read_params(folder, config, torch_dtype, torch_device, quantize, name_map, adapter, layers)
        model = build_model(config, params, context)
    if torch_device.type == "cpu":
        _keep_freed_memory()
    lm = LanguageModel(model, tokenizer, template, defaults, compile=compile, message_format=message_format)
    for name, source_of_adapter in (adapters or {}).items():
        lm.load_adapter(name, source_of_adapter)
    if isinstance(draft, os.PathLike) or (isinstance(draft, str) and draft not in LOOKUPS):
        lm.draft = load(draft, dtype=dtype, device=device, quantize=quantize, compile=compile, progress=progress)
    else:
        lm.draft = draft
    _log.info("loaded %s in %.2f s: %s; kernels %s", path, time.perf_counter() - began, lm, isa())
    return lm


def _family(folder: Checkpoint, via: str) -> Architecture | None:
    """The family's architecture; None where transformers is to run the model."""
    if via == "transformers":
        return None
    try:
        return read_config(folder.config)
    except UnsupportedArchitectureError as error:
        if via == "onward" or not isinstance(folder, CheckpointFolder):
            raise
        if find_spec("transformers") is None:
            advice = "with 'onward[transformers]' installed, transformers' own forward may run it"
            raise UnsupportedArchitectureError(f"{error}; {advice}") from error
        if not is_known(folder.config):
            raise
        return None


def _read_hosted(
    folder: Checkpoint,
    dtype: torch.dtype | None,
    device: torch.device,
    format: str | None,
    max_seq_len: int | None,
) -> Model:
    """The folder's model by transformers' own forward (docs/transformers.md), quantized, or packed on a CPU."""
    if not isinstance(folder, CheckpointFolder):
        raise RequestError(f"via='transformers' reads folders in the Hugging Face layout, and {folder.path} is none")
    module = read_module(folder, dtype, device)
    release = page_releaser(folder.path)

    def prepare(params: Any) -> Any:
        if format is not None:
            return quantize_params(params, format, release=release)[0]
        return pack_params(params, release=release) if device.type == "cpu" else params

    model = host(module, prepare, max_seq_len)
    if not model.compiles:
        warn(f"{type(module).__name__} runs eagerly: {model.why_eager}")
    return model


def _read_params(
    folder: Checkpoint,
    config: Architecture,
    dtype: torch.dtype | None,
    device: torch.device,
    format: str | None,
    name_map: NameMapSource,
    adapter: Adapter | None,
    layers: "_Layers",
) -> Any:
    """The weights: quantized where the folder or the caller says so, else packed for the kernels on a CPU."""
    if isinstance(folder, GgufCheckpoint):
        return _read_gguf(folder, config, dtype, device, format, name_map, adapter, layers)
    manifest = read_manifest(folder.path, folder.config)
    if manifest is not None:
        if name_map is not None:
            raise RequestError(
                f"a name map is for a torch.distributed.checkpoint folder, and {folder.path} is quantized"
            )
        if format not in (None, manifest.format):
            raise RequestError(f"{folder.path} is {manifest.format} already: load it without quantize={format!r}")
        params = read_quantized(folder.path, manifest, config, dtype=dtype, device=device)
        params = params if adapter is None else merged_params(config, params, adapter)
        # This packs the matrices that a converter left in floats; quantized ones stay the pages of the mapped file.
        return pack_params(params, release=layers.advance) if device.type == "cpu" else stack_params(params)
    method = method_of(folder.config)
    keeps_bits = isinstance(method, Mxfp4) and dtype != torch.float32 and device.type == "cpu"
    if method is not None and format is None and not keeps_bits:
        settings = folder.config.get("quantization_config") or folder.config["compression_config"]
        warn(
            f"{folder.path}: weights quantized by {settings['quant_method']} become floats as they are read, and so do "
            "activations: quantize='int8' or 'int4' holds them in fewer bits"
        )
    # What is not mapped (a distributed checkpoint, repacked bits) is put together layer by layer: memory holds it once.
    lean = device.type == "cpu" and (keeps_bits or (is_distributed(folder.path) and format is None))

    def each_layer(layer: Any) -> Any:
        whole = pack_layer(layer) if format is None else stack_params(layer)
        page_releaser(folder.path)()
        layers.advance()
        return whole

    params = read_weights(
        folder.path,
        config,
        dtype=dtype,
        device=device,
        name_map=name_map,
        each_layer=each_layer if lean else lambda layer: layer,
        keeps_bits=keeps_bits,
    )
    params = params if adapter is None else merged_params(config, params, adapter)
    release = page_releaser(folder.path)

    def after_layer() -> None:
        release()
        layers.advance()

    if format is not None:
        # The matrices of all layers come one after another, the embedding before them.
        ends = set(itertools.accumulate((count_matrices(layer) for layer in params.layers), initial=1))
        done = itertools.count(1)

        def after_matrix(report: TensorReport) -> None:
            if next(done) in ends:
                layers.advance()

        params = quantize_params(params, format, progress=after_matrix, release=release, keep=keeps_bits)[0]
        # What stays in floats (routers, convolutions) is packed as in a folder of quantized weights.
        return pack_params(params) if device.type == "cpu" else params
    if device.type != "cpu":
        return stack_params(params)
    return pack_params(params, release=release if lean else after_layer)


def _read_gguf(
    checkpoint: GgufCheckpoint,
    config: Architecture,
    dtype: torch.dtype | None,
    device: torch.device,
    format: str | None,
    name_map: NameMapSource,
    adapter: Adapter | None,
    layers: "_Layers",
) -> Any:
    """The weights of a GGUF file. Each layer is packed, and its pages are released, before the next is read."""
    if name_map is not None:
        raise RequestError(f"a name map is for a torch.distributed.checkpoint folder, and {checkpoint.path} is GGUF")
    blocks = [name for name in checkpoint.types if name not in ("F32", "F16", "BF16")]
    if format is not None and blocks:
        raise RequestError(f"{checkpoint.path} is quantized already ({blocks[0]}): load it without quantize={format!r}")
    release = checkpoint.page_releaser()

    def each_layer(layer: Any) -> Any:
        placed = pack_layer(layer) if device.type == "cpu" and format is None else layer
        release()
        layers.advance()
        return placed

    params = checkpoint.read_weights(config, dtype=dtype, device=device, each_layer=each_layer)
    params = params if adapter is None else merged_params(config, params, adapter)
    if format is not None:
        return quantize_params(params, format, release=release)[0]
    return pack_params(params, release=release) if device.type == "cpu" else params


class _Layers:
    """How many layers are in place: a bar on stderr once a second has passed, or a function's fraction.

    show: draw the bar. tell: is called with the fraction.
    """

    def __init__(self, count: int, show: bool, tell: Callable[[float], None] | None) -> None:
        self._count, self._done, self._tell = count, 0, tell
        self._bar: Any = tqdm(  # type: ignore[no-untyped-call]
            total=count, desc="Loading weights", unit="layer", disable=not show, delay=_BAR_DELAY_S, leave=False
        )

    def __enter__(self) -> "_Layers":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self) -> None:
        """One more; what follows the last layer (a head, say) counts for none."""
        if self._done == self._count:
            return
        self._done += 1
        self._bar.update()
        if self._tell is not None:
            self._tell(self._done / self._count)


def _as_source(source: str | os.PathLike[str]) -> str | Path:
    if isinstance(source, str):
        return source
    try:
        return Path(source)
    except TypeError as error:
        raise RequestError(f"a source is a folder, a hub id or 'demo'; got {source!r}") from error


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.removeprefix("torch."), dtype)
    if dtype is not None and dtype not in _DTYPES.values():
        raise RequestError(f"dtype must be bfloat16, float16 or float32; got {dtype!r}")
    return dtype if isinstance(dtype, torch.dtype) else None


def _as_device(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch_device = torch.device(device)
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError, TypeError) as error:
        # PyTorch adds a dump of its backends on further lines.
        reason = next(iter(str(error).splitlines()), "")
        if isinstance(error, NotImplementedError):  # here the dump begins on the first line
            reason = f"this PyTorch has no {str(device).partition(':')[0]} backend"
        raise RequestError(f"device {str(device)!r} cannot be used here ({reason}): try 'auto' or 'cpu'") from error
    if torch_device.type == "meta":
        raise RequestError("device 'meta' holds shapes without numbers, which decode to nothing: try 'auto' or 'cpu'")
    return torch_device


def _check_vocabulary(path: Path, vocab_size: int, tokenizer: Tokenizer | None, eos: tuple[int, ...]) -> None:
    """Raise unless the model's vocabulary has the tokenizer's ids and the EOS ids; it may have more (padding)."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary ends at "
            f"{vocab_size - 1}: they are of different models"
        )
    if outside := [token for token in eos if token >= vocab_size]:
        raise ConfigError(
            f"{path}: eos_token_id names id {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}"
        )


def _keep_freed_memory() -> None:
    """Let malloc keep what a prefill frees, instead of returning every activation's pages to the system.

    glibc keeps blocks up to the size of the largest one that was freed, at most 32 MB. So one such block is allocated
    and freed. Faulting the pages in again cost a fifth of a prefill (benchmarks/LOG.md).
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)


def _context(config: Architecture, max_seq_len: int | None) -> int:
    trained = config.max_position_embeddings
    if max_seq_len is None:
        return trained
    # Dynamic RoPE is made for lengths past the trained one; with the other schedules texts get poor there.
    if max_seq_len > trained and not config.serves_longer_texts:
        warn(
            f"max_seq_len {max_seq_len} is more than the model's max_position_embeddings {trained}: "
            "texts past that length will probably be poor"
        )
    return max_seq_len
