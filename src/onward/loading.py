"""`load`: a language model from a folder, a hub id or a name."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from onward.chat import MessageFormat, checked_format
from onward.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    find_adapter,
    find_folder,
    open_checkpoint,
    page_releaser,
    read_adapter,
)
from onward.checkpoint.dcp import NameMapSource
from onward.checkpoint.formats import methods_of
from onward.checkpoint.quantized_folder import read_manifest
from onward.checkpoint.source import checked_source
from onward.checkpoint.weights import is_known, read_module, read_parameters
from onward.decoding.speculation import HeadDrafter
from onward.distributed import Settings, load_ranks
from onward.errors import OptionError, RequestError, UnsupportedArchitectureError, warn
from onward.language_model import Draft, LanguageModel, generation_defaults, within_vocabulary
from onward.language_model.prefix_disk import checkpoint_identity
from onward.language_model.weights import (
    LayersInPlace,
    WeightsReader,
    find_head,
    is_draft_source,
    read_draft_head,
    refuse_head,
)
from onward.language_model.weights_copy import WeightsCopy
from onward.models import (
    Architecture,
    Model,
    build_model,
    check_backend,
    pack_params,
    read_config,
)
from onward.models.adapters import grown
from onward.models.architecture import build_trainable_model
from onward.models.blocks import Decoder
from onward.models.families import refuse_encoder
from onward.models.transformers import host
from onward.native import isa, num_threads
from onward.ops.kv_format import KVFormat, checked_cache_format
from onward.quantization import check_format, quantize_params
from onward.util.checks import check_whole
from onward.util.option_names import checks_option_names

_log = logging.getLogger(__name__)

_VIA = ("auto", "onward", "transformers")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DTYPES |= {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@checks_option_names
@torch.inference_mode(False)  # torch does not count writes to tensors of inference mode (`WeightsVersion`)
def load(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "auto",
    max_seq_len: int | None = None,
    progress: bool | Callable[[float], None] | None = None,
    quantize: str | None = None,
    cache_format: str | None = None,
    name_map: NameMapSource = None,
    compile: str = "auto",
    draft: Draft | os.PathLike[str] | None = None,
    message_format: str | MessageFormat | None = None,
    merge: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    control_vectors: Mapping[str, str | os.PathLike[str]] | None = None,
    via: str = "auto",
    prefix_cache_dir: str | os.PathLike[str] | None = None,
    prefix_cache_disk: int | None = None,
    pipeline: int = 1,
    address: str | None = None,
    trainable: bool | str = False,
) -> LanguageModel:
    """Load a model with its tokenizer, chat template and default options.

    Weights are mapped from their files. On a CPU each matrix is then packed for the kernels, and the file's pages are
    released, so that memory holds the weights once. Packed and quantized weights are stored in the cache folder for the
    next load (docs/environment.md).

    Args:
        source: a folder in the Hugging Face layout or one that torch.distributed.checkpoint wrote, with a config.json
            added; a GGUF file (docs/gguf.md); a hub id ("Qwen/Qwen3-0.6B", optionally with "@revision" and
            ":file.gguf"); or "demo", the bundled model.
        dtype: "bfloat16", "float16", "float32" or a torch dtype; by default the checkpoint's.
        device: "auto" (CUDA if available), "cpu", "cuda", …
        max_seq_len: the maximum number of positions; by default the checkpoint's max_position_embeddings.
        progress: show downloads, and slow loading of weights; by default on a terminal only. A function is called after
            each layer with the loaded fraction, from 0 to 1, for your own display.
        quantize: "int8", "int4" or "iq4_nl" stores all matrices in 8 or 4 bits (docs/quantization.md). A folder written
            by `quantize_folder` is already quantized.
        cache_format: "int8" stores keys and values in 8 bits, in about half the memory (docs/caches.md); by default
            they have the model's dtype.
        name_map: maps other names of weights to Hugging Face's: a JSON file or a mapping (docs/training.md). The
            default for a torch.distributed.checkpoint folder is its name_map.json, if any.
        compile: the backend: "auto", "native", "cuda", "inductor" or "eager" (docs/programs.md).
        draft: drafts the next tokens (docs/speculation.md): "lookup", "suffix"; a smaller model with the same
            vocabulary, loaded or as a source ("demo-draft" for "demo") with the same dtype, device and quantization;
            the source of an EAGLE-3 head of this model ("demo-head"); or "mtp", the MTP layer of its checkpoint.
        message_format: how the model writes reasoning and tool calls, if the chat template does not tell: a name in
            `onward.chat.FORMATS` or a `MessageFormat` (docs/chat.md).
        merge: an adapter, a folder written by peft or a hub id of one, to merge into the weights before quantization
            (docs/adapters.md).
        adapters: folders written by peft, or hub ids, by the names that requests use (`LanguageModel.load_adapter`).
        control_vectors: GGUF files, by the names that requests to a server use
            (`LanguageModel.load_control_vector`).
        via: the forward to run: "onward" (a built-in family), "transformers" (its own, with Onward's weights, attention
            and caches, docs/transformers.md), or "auto": the family, or else transformers if it is installed.
        prefix_cache_dir: a folder for a prefix cache on disk, which other processes and later runs share
            (docs/prefix-cache.md). prefix_cache_disk: the most bytes that it takes; 16 GiB by default.
        pipeline: the number of processes to spread the layers over (docs/sharding.md). The tokens are the same.
        address: "host:port" where this process waits for the others, each of which calls
            `onward.distributed.run_rank`. None starts them on this machine, "ray" on this process's Ray cluster.
        trainable: True keeps the weights as float32 parameters too, for an optimizer (`LanguageModel.parameters`), on
            the CPU. The model computes in `dtype`, with packed weights that follow the parameters
            (docs/exact-training.md). A name makes a LoRA adapter of that name to train (`LanguageModel.new_adapter`).

    Raises:
        SourceError: no such folder or repository. ConfigError: config.json or generation_config.json cannot be
        used. CheckpointError: the weights or the tokenizer do not fit config.json. TokenizerError: the tokenizer or
        the chat template cannot be read. RequestError: a bad argument. RankError: another process of the model fails.
    """
    started = time.perf_counter()
    if max_seq_len is not None:
        check_whole("max_seq_len", max_seq_len, low=1)
    if quantize is not None:
        check_format(quantize, "quantize")
    kv_format = checked_cache_format(cache_format)
    check_backend(compile)
    check_whole("pipeline", pipeline, low=1)
    if via not in _VIA:
        raise OptionError("via", f"must be one of {', '.join(_VIA)}; got {via!r}")
    checked_format(message_format)
    for option, named in (("adapters", adapters), ("control_vectors", control_vectors)):
        if not isinstance(named, Mapping | None):
            raise OptionError(option, f"must be sources by name, such as {{'poet': 'my-adapter'}}; got {named!r}")
    if not isinstance(trainable, bool | str):
        raise OptionError("trainable", f"must be True, or the name of an adapter to train; got {trainable!r}")
    adapter_sources = {name: checked_source(each) for name, each in (adapters or {}).items()}
    torch_dtype, torch_device = _as_dtype(dtype), _as_device(device)
    show_fraction = progress if callable(progress) else None
    if progress is None or show_fraction is not None:
        show = sys.stderr is not None and sys.stderr.isatty()
    else:
        show = bool(progress)
    path = find_folder(source, progress=show)
    merged = None if merge is None else find_adapter(merge, progress=show)
    adapter = None if merged is None else read_adapter(merged)
    how = torch_dtype, torch_device, quantize, cache_format, compile, via, max_seq_len, name_map
    places = [path, *([merged] if merged else []), *([Path(name_map)] if isinstance(name_map, str | Path) else [])]
    identity = None if prefix_cache_dir is None else checkpoint_identity(places, *how)
    folder = open_checkpoint(path)
    tokenizer, template = folder.tokenizer, folder.chat_template
    file = {"file": folder.generation_file} if isinstance(folder, CheckpointFolder) else {}
    defaults = generation_defaults(
        folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=path, **file
    )
    refuse_encoder(folder.config)
    refuse_head(folder.config)
    config = _family(folder, via)
    head = find_head(draft, folder, config, show)
    if pipeline > 1:
        others = {"merge": merge, "adapters": adapters, "name_map": name_map, "prefix_cache_dir": prefix_cache_dir}
        others |= {} if head is None else {"draft": str(draft)}
        _check_ranks(torch_device, hosted=config is None, **others)
    if trainable is True:
        others = {"quantize": quantize, "cache_format": cache_format, "merge": merge, "adapters": adapters}
        _check_trainable(folder, config, torch_device, pipeline=pipeline > 1, **others)
    if config is None:
        if name_map is not None or adapter is not None:
            raise RequestError("name_map= and merge= need a built-in family, and this model runs through transformers")
        model = _read_hosted(folder, torch_dtype, torch_device, quantize, max_seq_len, kv_format)
        tokenizer = None if tokenizer is None else tokenizer.within(path, model.vocab_size)
    else:
        context = _context(config, max_seq_len)
        merged_config = config if adapter is None else grown(config, adapter)
        if head is not None:
            assert isinstance(merged_config, Decoder), "checked with the head"
            merged_config = replace(merged_config, cached_taps=head[0].taps)
        if merged is not None and merged_config is not config:
            adapter_folder = CheckpointFolder(merged)
            tokenizer, template = adapter_folder.tokenizer or tokenizer, adapter_folder.chat_template or template
        tokenizer = None if tokenizer is None else tokenizer.within(path, merged_config.vocab_size)
        in_place = partial(LayersInPlace, show=show and show_fraction is None, tell=show_fraction)
        if pipeline > 1:
            settings = Settings(
                str(path),
                pipeline,
                None if torch_dtype is None else str(torch_dtype).removeprefix("torch."),
                quantize,
                cache_format,
                compile,
                context,
                None if address not in (None, "ray") else num_threads(),
            )
            model = load_ranks(settings, in_place, address)
        elif trainable is True:
            assert isinstance(folder, CheckpointFolder)
            parameters, own_dtype = read_parameters(folder, config, name_map)
            model = build_trainable_model(merged_config, parameters, torch_dtype or own_dtype, context)
        else:
            copy = None
            if torch_device.type == "cpu" and adapter is None and _is_in_floats(folder):
                copy = WeightsCopy.of(path, places, quantize, torch_dtype, name_map)
            with in_place(len(config.layers)) as layers:
                reader = WeightsReader(
                    folder, config, torch_dtype, torch_device, quantize, name_map, adapter, layers, kv_format, copy
                )
                model = build_model(merged_config, reader.read(), context, kv_format)
    defaults = within_vocabulary(defaults, model.vocab_size, path)
    if torch_device.type == "cpu":
        _keep_freed_memory()
    backend = compile if pipeline == 1 else "eager"  # the ranks compile their parts
    embedding = folder.embedding_format if isinstance(folder, CheckpointFolder) else None
    if isinstance(folder, CheckpointFolder) and not folder.has_head:
        model = replace(model, has_head=False)
    lm = LanguageModel(
        model, tokenizer, template, defaults, compile=backend, message_format=message_format, embedding=embedding,
        prefix_cache_dir=prefix_cache_dir, prefix_cache_disk=prefix_cache_disk,
    )  # fmt: skip
    lm.source = path
    if lm._disk is not None:
        unchanged = identity == checkpoint_identity(places, *how)
        name = Path(source).name or path.name  # not a snapshot's of a hub id, which is a hash
        facts = [name, *(each for each in (quantize, cache_format and f"{cache_format} cache") if each)]
        lm._disk.read_from(model, identity if unchanged else None, " ".join(facts))
    for name, adapter_source in adapter_sources.items():
        lm.load_adapter(name, adapter_source)
    for name, vector_source in (control_vectors or {}).items():
        lm.load_control_vector(name, vector_source)
    if isinstance(trainable, str):
        lm.new_adapter(trainable)
    if head is not None:
        lm.draft = HeadDrafter(head[0], read_draft_head(*head, model, quantize), compile)
    elif is_draft_source(draft):
        lm.draft = load(
            draft,
            dtype=dtype,
            device=device,
            quantize=quantize,
            cache_format=cache_format,
            compile=compile,
            progress=progress,
        )
    else:
        lm.draft = cast("Draft | None", draft)
    _log.info("loaded %s in %.2f s: %s; kernels %s", path, time.perf_counter() - started, lm, isa())
    return lm


def _family(folder: Checkpoint, via: str) -> Architecture | None:
    """The architecture of a built-in family; None if transformers runs the model."""
    if via == "transformers":
        return None
    try:
        return read_config(folder.config)
    except UnsupportedArchitectureError as error:
        if via == "onward" or not isinstance(folder, CheckpointFolder):
            raise
        if find_spec("transformers") is None:
            advice = "transformers may support it: pip install 'onward[transformers]'"
            raise UnsupportedArchitectureError(f"{error}; {advice}") from error
        if not is_known(folder.config):
            problem = "transformers has no causal language model of that name"
            raise UnsupportedArchitectureError(f"{error}; {problem}") from error
        return None


def _check_trainable(folder: Checkpoint, config: Architecture | None, device: torch.device, **options: object) -> None:
    """Raise `RequestError` for a checkpoint and options that cannot be trained."""
    if config is None:
        raise RequestError("trainable= needs a built-in family, and this model runs through transformers: leave it out")
    if names := [name for name, value in options.items() if value]:
        raise RequestError(f"trainable= does not work with {names[0]}=: leave one of them out")
    if device.type != "cpu":
        raise RequestError(f"trainable= needs device 'cpu', and the device is {str(device)!r}")
    if not isinstance(folder, CheckpointFolder):
        raise RequestError(
            f"trainable= needs a folder of safetensors, and {folder.path} is not one: convert it with "
            "`onward convert --to safetensors`"
        )
    if not _is_in_floats(folder):
        raise RequestError(
            f"the weights of {folder.path} are quantized, and quantized weights have no gradient: load the checkpoint "
            "in floats, or convert it with `onward convert --to safetensors`"
        )


def _is_in_floats(folder: Checkpoint) -> bool:
    """Whether this is a folder of weights that are not quantized."""
    config = folder.config
    is_folder = isinstance(folder, CheckpointFolder)
    return is_folder and methods_of(config) is None and read_manifest(folder.path, config) is None


def _check_ranks(device: torch.device, *, hosted: bool, **options: object) -> None:
    """Raise `RequestError` for options that several processes do not support."""
    if names := [name for name, value in options.items() if value]:
        raise RequestError(f"pipeline= does not work with {names[0]}= yet: leave one of them out")
    if hosted:
        raise RequestError("pipeline= needs a built-in family, and this model runs through transformers: leave it out")
    if device.type != "cpu":
        raise RequestError(f"pipeline= needs device 'cpu', and the device is {str(device)!r}")


def _read_hosted(
    folder: Checkpoint,
    dtype: torch.dtype | None,
    device: torch.device,
    format: str | None,
    max_seq_len: int | None,
    cache_format: KVFormat | None,
) -> Model:
    """The model with transformers' own forward (docs/transformers.md), quantized, or packed on a CPU."""
    if not isinstance(folder, CheckpointFolder):
        raise RequestError(
            f"via='transformers' needs a folder in the Hugging Face layout, and {folder.path} is not one"
        )
    module = read_module(folder, dtype, device)
    release = page_releaser(folder.path)

    def prepare(params: Any) -> Any:
        if format is not None:
            return quantize_params(params, format, release=release)[0]
        return pack_params(params, release=release) if device.type == "cpu" else params

    model = host(module, prepare, max_seq_len, cache_format)
    if not model.compiles:
        warn(f"{type(module).__name__} runs eagerly: {model.why_eager}")
    return model


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.removeprefix("torch."), dtype)
    if dtype is not None and dtype not in _DTYPES.values():
        raise OptionError("dtype", f"must be bfloat16, float16 or float32; got {dtype!r}")
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
        if isinstance(error, NotImplementedError):  # for which the dump begins on the first line
            reason = f"this PyTorch has no {str(device).partition(':')[0]} backend"
        raise OptionError("device", f"{str(device)!r} cannot be used here ({reason}): try 'auto' or 'cpu'") from error
    if torch_device.type == "meta":
        raise OptionError("device", "'meta' has no data to compute with: try 'auto' or 'cpu'")
    return torch_device


def _keep_freed_memory() -> None:
    """Let malloc keep the memory that a prefill frees: faulting its pages in again costs a fifth of a prefill
    (benchmarks/LOG.md). glibc keeps blocks up to the size of the largest freed one, at most 32 MB: this frees one."""
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)


def _context(config: Architecture, max_seq_len: int | None) -> int:
    trained = config.max_position_embeddings
    # Dynamic RoPE supports lengths past the trained one; with other schedules texts get poor there.
    if max_seq_len is not None and max_seq_len > trained and not config.serves_longer_texts:
        warn(
            f"max_seq_len {max_seq_len} is more than the model's max_position_embeddings {trained}: "
            "texts past that length will probably be poor"
        )
    return trained if max_seq_len is None else max_seq_len
