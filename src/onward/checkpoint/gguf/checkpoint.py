"""A GGUF model: one file, or the parts that llama.cpp's gguf-split makes of it. No other file is needed."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onward.chat.template import ChatTemplate
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY, WITH_TENSOR
from onward.checkpoint.gguf.family import GgufFamily
from onward.checkpoint.gguf.keys import NUMBERS, SAMPLING, ZERO_IS_OFF, check_unread, unknown_keys
from onward.checkpoint.gguf.names import gguf_name, with_fused_experts
from onward.checkpoint.gguf.reader import GgufFile, GgufTensor, Keys, list_of, number, same_everywhere, whole_numbers
from onward.checkpoint.gguf.rope import rope_parameters
from onward.checkpoint.gguf.vocabulary import NAMED_ENDS, Vocabulary
from onward.checkpoint.gguf.weights import GgufTensors
from onward.checkpoint.shards import releaser_of
from onward.errors import CheckpointError, ConfigError, TokenizerError, UnsupportedArchitectureError
from onward.models import Architecture, WeightScope
from onward.models.architecture import PartOfCheckpoint
from onward.tokenizer.tokenizer import JsonTokenizer


def family_of(metadata: Mapping[str, Any], tensors: Collection[str], where: object) -> GgufFamily:
    """The family of a file, by its architecture, keys and tensors."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{where}: general.architecture must be a name; got {architecture!r}")
    if architecture not in FAMILIES:
        raise UnsupportedArchitectureError(
            f"{where}: architecture {architecture!r} is not supported in GGUF; supported are {', '.join(FAMILIES)}"
        )
    keys = Keys(metadata)
    families = [family for (name, key), family in WITH_KEY.items() if name == architecture and _is_set(keys.get(key))]
    families += [family for (name, end), family in WITH_TENSOR.items() if name == architecture and _has(tensors, end)]
    family = [*families, FAMILIES[architecture]][0]
    return with_fused_experts(family) if _has(tensors, ".ffn_gate_up_exps.weight") else family


def _is_set(value: Any) -> bool:
    return any(isinstance(each, int | np.integer) and each for each in list_of(value) or [value])


def _has(tensors: Collection[str], end: str) -> bool:
    return any(name.endswith(end) for name in tensors)


def config_and_keys(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: object
) -> tuple[dict[str, Any], Keys]:
    """The fields of config.json, and the keys they were read from; `ConfigError` if no field can express them."""
    family, keys = family_of(metadata, tensors, where), Keys(metadata)
    config: dict[str, Any] = {"architectures": [family.architecture], "hidden_act": "silu", **family.config}
    config |= _numbers(keys, family, where)
    head_dim = head_dim_of(config)
    value_length = same_everywhere(keys.get("attention.value_length"), f"{where}: value_length")
    has_one_width = family.numbers.get("head_dim", NUMBERS["head_dim"]) == NUMBERS["head_dim"]
    if has_one_width and value_length is not None and value_length != head_dim:
        raise ConfigError(f"{where}: key length {head_dim} and value length {value_length} must be equal")
    if has_one_width and head_dim is not None:
        config["head_dim"] = head_dim
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for field, part in family.parts.items():
        config[field] = _has(tensors, f".{part}") if isinstance(part, str) else part(tensors)
    config["rope_parameters"] = rope_parameters(keys, tensors, head_dim, where)
    try:
        config |= family.derived(keys, config)
        check_unread(keys, family, config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {metadata['general.architecture']}: {error}") from error
    return config, keys


def _numbers(keys: Keys, family: GgufFamily, where: object) -> dict[str, Any]:
    numbers = {field: key for field, key in {**NUMBERS, **family.numbers}.items() if key is not None}
    fields: dict[str, Any] = {}
    for field, key in numbers.items():
        if (value := keys.get(key)) is None:
            continue
        value = same_everywhere(value, f"{where}: {keys.prefix}{key}", ignore_zeros=key.startswith("expert_"))
        if value == 0 and key in ZERO_IS_OFF:
            fields |= {field: None} if key.endswith("softcapping") else {}
        else:
            fields[field] = value
    # config.json has defaults for these, but llama.cpp requires them.
    required = {numbers.get("rms_norm_eps")}
    if "expert_used_count" in numbers.values() and number(keys, "expert_count"):
        required.add("expert_used_count")
    for name in required:
        if name is not None and name not in keys:
            raise ConfigError(f"{where}: {keys.prefix}{name} is missing")
    if NUMBERS["num_key_value_heads"] in numbers.values() and "num_attention_heads" in fields:
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    ahead, layers = number(keys, "nextn_predict_layers", 0), fields.get("num_hidden_layers")
    if ahead and isinstance(layers, int):
        if not isinstance(ahead, int) or not 0 < ahead < layers:
            raise ConfigError(f"{where}: nextn_predict_layers must be less than the {layers} layers; got {ahead}")
        fields["num_hidden_layers"] = layers - ahead
    return fields


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """The config's head_dim, explicit or implied; None if it is invalid, which the config's reader reports."""
    head_dim, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return head_dim if type(head_dim) is int and head_dim > 0 else None


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
TEMPLATE = "tokenizer.chat_template"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def parts_of(name: str) -> list[str]:
    """The names of all parts of a split model, in order, given one of them; the name itself if it is not split."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]


@dataclass(frozen=True)
class GgufCheckpoint:
    """The equivalent of a `CheckpointFolder` for a GGUF file. path: the file, or any part of a split one."""

    path: Path

    @cached_property
    def files(self) -> list[GgufFile]:
        paths = [self.path.with_name(name) for name in parts_of(self.path.name)]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: a split GGUF model needs all its {len(paths)} parts")
        files = [GgufFile(path) for path in paths]
        for part, file in enumerate(files):
            count, at = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
            whole = len(files) == 1 and count == 0
            if type(count) is not int or not (count == len(files) or whole) or type(at) is not int or at != part:
                raise CheckpointError(
                    f"{file.path} claims to be part {at} of {count} (from 0), but its name says part {part} of "
                    f"{len(files)}: restore the parts' original names"
                )
        return files

    @cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for file in self.files:
            for name, tensor in file.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{file.path}: tensor {name!r} is in another part too")
                tensors[name] = tensor
        return tensors

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json that the model would have in the Hugging Face layout."""
        return config_and_keys(self._metadata, self.tensors, self.path)[0]

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The recommended sampling settings, if any."""
        values = {field: self._metadata.get(f"general.sampling.{key}") for field, key in SAMPLING.items()}
        # A float32 as people write it: 0.7, not 0.699999988.
        shortest = {field: float(f"{value:.7g}") for field, value in values.items() if isinstance(value, float)}
        advice: dict[str, Any] = {field: value for field, value in (values | shortest).items() if value is not None}
        advice |= {"do_sample": True} if advice else {}
        # As in llama.cpp, ids past the vocabulary are ignored.
        count = 0 if self.vocabulary is None else len(self.vocabulary.tokens)
        suppressed = [id for id in whole_numbers(SUPPRESSED, self._metadata.get(SUPPRESSED)) or [] if 0 <= id < count]
        return advice | ({"suppress_tokens": suppressed} if suppressed else {})

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """None if the file has no tokenizer: the model then works on token ids."""
        kind = self._metadata.get("tokenizer.ggml.model")
        if kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab")):
            return None
        return Vocabulary(self._metadata, self.path)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return {} if self.vocabulary is None else self.vocabulary.config

    @cached_property
    def tokenizer(self) -> JsonTokenizer | None:
        return None if self.vocabulary is None else self.vocabulary.tokenizer()

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        source, tools = (self._template(name) for name in (TEMPLATE, f"{TEMPLATE}.tool_use"))
        if source is None:
            return None
        texts = {name: text for name, text in self.tokenizer_config.items() if name.endswith("_token")}
        return ChatTemplate(source, texts, tools)

    @cached_property
    def eos(self) -> tuple[int, ...]:
        if self.vocabulary is not None:
            return self.vocabulary.ends
        named = [self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NAMED_ENDS]
        embedding = self.tensors.get("token_embd.weight")
        count = math.inf if embedding is None else embedding.shape[0]
        return tuple(id for id in named if type(id) is int and 0 <= id < count)

    @cached_property
    def unknown_keys(self) -> list[str]:
        """Metadata keys that are ignored because neither llama.cpp nor Onward knows them."""
        keys = config_and_keys(self._metadata, self.tensors, self.path)[1]
        return [keys.prefix + key for key in unknown_keys(keys)]

    @cached_property
    def types(self) -> dict[str, int]:
        """The types of the matrices and the number of weights of each, most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.type.name] += len(tensor.rows) * tensor.shape[-1]
        return dict(counts.most_common())

    def read_weights(
        self,
        config: Architecture,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        exact: bool = False,
        each_layer: Callable[[Any], Any] = lambda layer: layer,
    ) -> Any:
        """Read all weights of a model; every tensor of the file must belong to it. dtype, device, exact: as for
        `GgufTensors`. each_layer: converts each layer (packs it, say) as soon as it is read."""
        family, fields = family_of(self._metadata, self.tensors, self.path), self.config
        fields = fields | {"head_dim": head_dim_of(fields)}
        ahead = self._metadata.get(f"{self._metadata['general.architecture']}.nextn_predict_layers", 0)
        # Each layer has at least one tensor, which bounds a made-up count.
        ahead, first = min(ahead if isinstance(ahead, int) else 0, len(self.tensors)), fields["num_hidden_layers"]
        unread = [f"blk.{layer}." for layer in range(first, first + ahead)]  # multi-token prediction layers
        if isinstance(config, PartOfCheckpoint):
            unread += [gguf_name(f"{start}weight", family).tensors[0] for start in config.unread]
        reader = GgufTensors(self.path, self.tensors, family, fields, dtype, device, exact)
        params = config.read(WeightScope(reader), each_layer)
        reader.check_all_read(unread)
        return params

    def page_releaser(self) -> Callable[[], None]:
        return releaser_of(file.path for file in self.files)

    @property
    def _metadata(self) -> dict[str, Any]:
        return self.files[0].metadata

    def _template(self, name: str) -> str | None:
        source = self._metadata.get(name)
        if source is not None and not isinstance(source, str):
            raise TokenizerError(f"{self.path}: {name} must be a string; got {type(source).__name__}")
        return source
