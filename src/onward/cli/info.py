"""`onward info`: the machine, and a checkpoint's architecture and memory use."""

import dataclasses
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from onward import __version__
from onward.cli.flags import AS_JSON, CACHE_FORMAT, MEMORY, MODEL, SourceArgument, flag
from onward.cli.inputs import find
from onward.cli.terminal import is_terminal, waiting, wrapped
from onward.errors import RequestError, UnsupportedArchitectureError
from onward.util.text import in_bytes

if TYPE_CHECKING:
    from onward.language_model import GenerateOptions
    from onward.models import Architecture


class Fact(NamedTuple):
    """A JSON field and value. Text output drops the name's unit, and prints `shown` instead of the value if set."""

    name: str
    value: Any
    shown: str | None = None


Sections = Mapping[str, Sequence[Fact]]

_LABEL_WIDTH = 20
_UNITS = "_(bytes|gb_s|tokens_s|s)$"

# Vector instructions, by their names in /proc/cpuinfo on x86-64 and ARM.
_INSTRUCTIONS = re.compile("avx|fma$|f16c|amx|asimd|i8mm|bf16|sve|sme")


def info(
    source: SourceArgument = None,
    *,
    model: str | None = flag("The same as SOURCE.", "-m", group=MODEL, metavar="SOURCE"),
    context: int | None = flag("Context length in tokens.", group=MEMORY, show_default="the model's", low=1),
    batch: int = flag("Batch size in sequences.", group=MEMORY, default=1, low=1),
    cache_format: str | None = CACHE_FORMAT,
    as_json: bool = AS_JSON,
) -> None:
    """Show the machine, and a model's architecture and memory use.

    Without SOURCE, only the machine, the kernels and the versions are shown.
    Memory is computed for the weights, and for the KV cache with --context
    and --batch. The weights are not loaded, but a hub id is downloaded.
    """
    if source is not None and model is not None:
        raise RequestError(f"two models, {source!r} and --model {model}: give one")
    source = model if source is None else source
    if source is None and (context is not None or batch != 1 or cache_format is not None):
        raise RequestError("--context, --batch and --cache-format need a model: add SOURCE")
    with waiting("looking …"):
        sections = {"machine": machine_facts(), "kernels": kernel_facts(), "software": _software_facts()}
    if source is not None:
        folder = find(source)
        with waiting(f"looking at {source} …"):
            checkpoint = CheckpointSummary(folder)
            sections["checkpoint"] = checkpoint.facts()
        sections["memory"] = checkpoint.memory_facts(context, batch, cache_format)
    if as_json:
        typer.echo(json.dumps(as_object(sections), ensure_ascii=False).encode())
    else:
        print_sections(sections)


def as_object(sections: Sections) -> dict[str, dict[str, Any]]:
    return {section: {fact.name: fact.value for fact in facts} for section, facts in sections.items()}


def print_sections(sections: Sections) -> None:
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    for line in as_lines(sections, width):
        typer.echo(line if line.startswith(" ") else typer.style(line, bold=True))


def as_lines(sections: Sections, width: int | None) -> list[str]:
    """Return the sections as lines of at most `width` columns; None: of any length."""
    lines: list[str] = []
    for section, facts in sections.items():
        lines += [*([""] if lines else []), section]
        for fact in facts:
            name = re.sub(_UNITS, "", fact.name).replace("_", " ")
            line = f"  {name:<{_LABEL_WIDTH - 2}}{_shown(fact)}"
            lines += wrapped(line, width or sys.maxsize).split("\n")
    return lines


def _shown(fact: Fact) -> str:
    if fact.shown is not None:
        return fact.shown
    if isinstance(fact.value, bool):
        return "yes" if fact.value else "no"
    if isinstance(fact.value, int):
        return f"{fact.value:,}"
    if isinstance(fact.value, list):
        return ", ".join(map(str, fact.value)) or "none"
    return "none" if fact.value is None else str(fact.value)


def machine_facts() -> list[Fact]:
    from onward.native.machine import machine_memory, system_fields

    cpuinfo = system_fields("/proc/cpuinfo")
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    memory = zip(("memory_bytes", "free_memory_bytes"), machine_memory(), strict=True)
    return [
        Fact("processor", cpuinfo.get("model name") or platform.processor() or platform.machine()),
        Fact("cores", usable_cores(), f"{usable_cores()} of {os.cpu_count()} usable"),
        Fact("instructions", sorted(filter(_INSTRUCTIONS.match, flags)), None if flags else "unknown"),
        *(Fact(name, size, "unknown" if size is None else in_bytes(size)) for name, size in memory),
        Fact("system", f"{platform.system()} {platform.release()}"),
    ]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernel_facts() -> list[Fact]:
    from onward import native, ops

    built = native.built_isas()
    if not built:
        form = "PyTorch's operators: no native library was built (reinstall with a C++ compiler)"
        return [Fact("form", "definition", form)]
    choice = ops.choice()
    shown = None if choice.form == "native" else "PyTorch's operators, set by ONWARD_OPS or ONWARD_ISA"
    return [
        Fact("form", choice.form, shown),
        Fact("instruction_set", choice.isa),
        Fact("built", built),
        Fact("usable", native.available_isas()),
        Fact("threads", native.num_threads(), f"{native.num_threads()} ({native.configured_threads()[1]})"),
    ]


def _software_facts() -> list[Fact]:
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Fact("onward", __version__),
        Fact("python", platform.python_version()),
        Fact("torch", torch.__version__),
        Fact("torch_threads", torch.get_num_threads()),
        Fact("torch_vectors", torch.backends.cpu.get_cpu_capability()),
        Fact("cuda_devices", [f"{device.name} ({in_bytes(device.total_memory)})" for device in devices]),
    ]


class CheckpointSummary:
    """A checkpoint opened as `onward.load` does, with its weights mapped but not read."""

    def __init__(self, path: Path) -> None:
        import torch

        from onward.checkpoint import GgufCheckpoint, open_checkpoint, read_weights
        from onward.checkpoint.quantized_folder import read_manifest
        from onward.models import build_model

        self._folder = folder = open_checkpoint(path)
        self._config = self._read_config()
        cpu = torch.device("cpu")
        self._unknown_keys: list[str] = []
        if isinstance(folder, GgufCheckpoint):
            self._format: str | None = ", ".join(folder.types)
            self._unknown_keys = folder.unknown_keys
            files = [file.path for file in folder.files]
            params = folder.read_weights(self._config, dtype=None, device=torch.device("meta"))
        else:
            manifest = read_manifest(path, folder.config)
            self._format = None if manifest is None else manifest.format
            files = [file for kind in ("safetensors", "distcp") for file in path.glob(f"*.{kind}")]
            params = read_weights(path, self._config, dtype=None, device=cpu, manifest=manifest, keeps_bits=True)
        self._disk_bytes = sum(file.stat().st_size for file in files)
        self._dtype = params.embed_tokens.weight.dtype
        self._model = build_model(self._config, params)

    def _read_config(self) -> "Architecture":
        from onward.checkpoint import CheckpointFolder
        from onward.checkpoint.weights import is_known
        from onward.models import read_config

        try:
            return read_config(self._folder.config)
        except UnsupportedArchitectureError as error:
            if (
                isinstance(self._folder, CheckpointFolder)
                and find_spec("transformers")
                and is_known(self._folder.config)
            ):
                (name,) = self._folder.config["architectures"]
                raise UnsupportedArchitectureError(
                    f"info does not support {name}, which runs through transformers: other commands can load it"
                ) from error
            raise

    def facts(self) -> list[Fact]:
        return [
            Fact("folder", str(self._folder.path)),
            Fact("architecture", self._folder.config["architectures"][0]),
            Fact("parameters", self._model.num_parameters),
            Fact("dtype", str(self._dtype).removeprefix("torch.")),
            Fact("quantized", self._format),
            Fact("disk_bytes", self._disk_bytes, in_bytes(self._disk_bytes)),
            *_architecture_facts(self._config),
            *([Fact("ignored_keys", ", ".join(self._unknown_keys))] if self._unknown_keys else []),
            *self._text_facts(),
        ]

    def memory_facts(self, context: int | None, batch: int, cache_format: str | None = None) -> list[Fact]:
        """Memory of the weights and of a KV cache for `batch` rows of `context` positions (default: the model's)."""
        from onward.models.architecture import cache_plan
        from onward.ops.kv_format import checked_cache_format

        trained = self._config.max_position_embeddings
        positions = trained if context is None else context
        beyond = f" (the model was trained for {trained:,})" if positions > trained else ""
        plan = cache_plan(self._config, self._dtype, format=checked_cache_format(cache_format))
        weights, cache = self._model.nbytes, batch * plan.bytes_of(positions)
        return [
            Fact("context", positions, f"{positions:,}{beyond}"),
            Fact("batch", batch),
            Fact("cache_format", plan.rows.name),
            Fact("weights_bytes", weights, in_bytes(weights)),
            Fact("cache_bytes", cache, f"{in_bytes(cache)} ({in_bytes(cache // (positions * batch))} a token)"),
            Fact("total_bytes", weights + cache, in_bytes(weights + cache)),
        ]

    def _text_facts(self) -> list[Fact]:
        from onward.language_model import generation_defaults

        folder, tokenizer = self._folder, self._folder.tokenizer
        defaults = generation_defaults(
            folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=folder.path
        )
        sampling = _sampling(defaults)
        brief = [f"{k} of {len(v)}" if isinstance(v, list | tuple) else f"{k} {v}" for k, v in sampling.items()]
        return [
            Fact("tokenizer_size", None if tokenizer is None else tokenizer.vocab_size),
            Fact("chat_template", folder.chat_template is not None),
            Fact("eos", list(folder.eos)),
            Fact("sampling", sampling, ", ".join(brief)),
        ]


def _sampling(defaults: "GenerateOptions") -> dict[str, object]:
    """The temperature, and the options that differ from Onward's defaults; eos has its own line."""
    values = {field.name: (getattr(defaults, field.name), field.default) for field in dataclasses.fields(defaults)}
    changed = {name: value for name, (value, own) in values.items() if value != own and name != "eos"}
    shown: dict[str, object] = {"temperature": defaults.temperature} | changed
    if "logit_bias" in shown:  # JSON has no infinity: null stands for a ban
        bias = dict(defaults.logit_bias)
        shown["logit_bias"] = [[token, None if value == float("-inf") else value] for token, value in bias.items()]
    return shown


def _architecture_facts(config: "Architecture") -> list[Fact]:
    """Facts about the layers; a value that differs between layers is listed."""
    from onward.cache import StateShape

    mixers = [getattr(layer.mixer, "attention", layer.mixer) for layer in config.layers]
    attending = [mixer for mixer in mixers if not isinstance(getattr(mixer, "cached", None), StateShape)]
    windows = [getattr(mixer, "window", None) for mixer in mixers]
    return [
        Fact("layers", len(config.layers)),
        Fact("hidden_size", config.hidden_size),
        *_values("intermediate_size", [layer.feed_forward for layer in config.layers], "intermediate_size"),
        *_values("heads", attending, "num_heads"),
        *_values("kv_heads", attending, "num_kv_heads"),
        *_values("head_dim", attending, "head_dim"),
        Fact("vocabulary", config.vocab_size),
        Fact("tied_head", config.tie_word_embeddings),
        Fact("context", config.max_position_embeddings),
        Fact("sliding_window", windows, _windows(windows)),
        *_ropes(mixers),
    ]


def _values(name: str, parts: Sequence[Any], field: str) -> list[Fact]:
    values = list(dict.fromkeys(getattr(part, field) for part in parts if hasattr(part, field)))
    return [Fact(name, values[0] if len(values) == 1 else values)] if values else []


def _windows(windows: Sequence[int | None]) -> str:
    sizes = [size for size in windows if size is not None]
    distinct = ", ".join(f"{size:,}" for size in sorted(set(sizes)))
    return f"{distinct} in {len(sizes)} of {len(windows)} layers" if sizes else "none"


def _ropes(mixers: Sequence[Any]) -> list[Fact]:
    values, texts = [], []
    for rope in dict.fromkeys(rope for mixer in mixers if (rope := getattr(mixer, "rope", None)) is not None):
        scaling = rope.scaling
        values.append({"kind": scaling.kind, "base": rope.base, "factor": scaling.factor})
        scaled = f", {scaling.kind} x {scaling.factor:g} from {scaling.original_max_position:,}"
        texts.append(f"base {rope.base:,.0f}{'' if scaling.kind == 'default' else scaled}")
    return [Fact("rope", values[0] if len(values) == 1 else values, "; ".join(texts))] if values else []
