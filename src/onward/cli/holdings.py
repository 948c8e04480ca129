"""What a checkpoint holds, and the memory it takes. The weights are mapped and not read."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from onward.cli.architecture_facts import architecture_facts
from onward.cli.facts import Fact
from onward.errors import RequestError
from onward.reprs import in_bytes

if TYPE_CHECKING:
    from onward import GenerateOptions


class Holdings:
    """A checkpoint, read as `onward.load` reads it but for its weights, of which only the shapes are used."""

    def __init__(self, path: Path) -> None:
        import torch

        from onward.checkpoint import GgufCheckpoint, open_checkpoint, read_weights
        from onward.checkpoint.quantized import read_manifest, read_quantized
        from onward.models import build_model, read_config

        self.folder = folder = open_checkpoint(path)
        self.config = read_config(folder.config)
        cpu = torch.device("cpu")
        if isinstance(folder, GgufCheckpoint):
            self.format: str | None = ", ".join(folder.types)
            self.unknown_keys = folder.unknown_keys
            self.disk_bytes = sum(file.path.stat().st_size for file in folder.files)
            params = folder.read_weights(self.config, dtype=None, device=torch.device("meta"))
        else:
            self.unknown_keys = []
            manifest = read_manifest(path, folder.config)
            self.format = None if manifest is None else manifest.format
            self.disk_bytes = _disk_bytes(path)
            params = (
                read_weights(path, self.config, dtype=None, device=cpu, keeps_bits=True)
                if manifest is None
                else read_quantized(path, manifest, self.config, dtype=None, device=cpu)
            )
        self.dtype = params.embed_tokens.weight.dtype
        self.model = build_model(self.config, params)

    def checkpoint_facts(self) -> list[Fact]:
        config, folder, parameters = self.config, self.folder, self.model.num_parameters
        return [
            Fact("folder", str(folder.path)),
            Fact("architecture", folder.config["architectures"][0]),
            Fact("parameters", parameters),
            Fact("dtype", str(self.dtype).removeprefix("torch.")),
            Fact("quantized", self.format),
            Fact("disk_bytes", self.disk_bytes, in_bytes(self.disk_bytes)),
            *architecture_facts(config),
            *([Fact("ignored_keys", ", ".join(self.unknown_keys))] if self.unknown_keys else []),
            *self._text_facts(),
        ]

    def memory_facts(self, context: int | None, batch: int) -> list[Fact]:
        """Of the weights and of a cache for `batch` rows of `context` positions (the model's own by default)."""
        trained = self.config.max_position_embeddings
        positions = trained if context is None else context
        for name, value in (("--context", positions), ("--batch", batch)):
            if value < 1:
                raise RequestError(f"{name} must be 1 or more; got {value}")
        beyond = f" (the model was made for {trained:,})" if positions > trained else ""
        weights, cache = self.model.nbytes, self._cache_bytes(positions, batch)
        return [
            Fact("context", positions, f"{positions:,}{beyond}"),
            Fact("batch", batch),
            Fact("weights_bytes", weights, in_bytes(weights)),
            Fact("cache_bytes", cache, f"{in_bytes(cache)} ({in_bytes(cache // (positions * batch))} a token)"),
            Fact("total_bytes", weights + cache, in_bytes(weights + cache)),
        ]

    def _cache_bytes(self, positions: int, batch: int) -> int:
        import torch

        from onward.cache.shape import kept_positions, widest_window
        from onward.cache.states import new_states
        from onward.models.architecture import states_of

        states = new_states(states_of(self.config), batch, self.dtype, torch.device("meta"))  # shapes alone, no memory
        shapes = self.config.cached
        window = widest_window(shapes)
        numbers: int = sum(shape.features * kept_positions(shape, window, positions) for shape in shapes)
        return sum(state.nbytes for state in states) + batch * numbers * int(self.dtype.itemsize)

    def _text_facts(self) -> list[Fact]:
        from onward.requests import generation_defaults

        folder = self.folder
        tokenizer = folder.tokenizer
        defaults = generation_defaults(
            folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=folder.path
        )
        return [
            Fact("tokenizer_size", None if tokenizer is None else tokenizer.vocab_size),
            Fact("chat_template", folder.chat_template is not None),
            Fact("eos", list(folder.eos)),
            Fact("sampling", sampling := _sampling(defaults), ", ".join(map(_brief, sampling, sampling.values()))),
        ]


def _disk_bytes(folder: Path) -> int:
    """Of the weights' files, however many there are."""
    return sum(file.stat().st_size for kind in ("safetensors", "distcp") for file in folder.glob(f"*.{kind}"))


def _sampling(defaults: "GenerateOptions") -> dict[str, object]:
    """The options that differ from Onward's own; the temperature always, eos has a line of its own."""
    values = {field.name: (getattr(defaults, field.name), field.default) for field in dataclasses.fields(defaults)}
    changed = {name: value for name, (value, own) in values.items() if value != own and name != "eos"}
    shown: dict[str, object] = {"temperature": defaults.temperature} | changed
    if "logit_bias" in shown:  # JSON has no infinity: null bans
        bias = dict(defaults.logit_bias)
        shown["logit_bias"] = [[token, None if value == float("-inf") else value] for token, value in bias.items()]
    return shown


def _brief(name: str, value: object) -> str:
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else f"{name} {value}"
