"""A model in the Hugging Face layout -> the metadata and tensors of a GGUF file, as llama.cpp's converter makes them.

What `onward.checkpoint.gguf` reads from the file is what was written: the caller holds the architectures against each
other (`onward.checkpoint.convert`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.config import config_of, head_dim_of
from onward.checkpoint.gguf.exporting_families import Written
from onward.checkpoint.gguf.exporting_rope import rope_metadata, rope_tensors
from onward.checkpoint.gguf.exporting_weights import model_tensors
from onward.checkpoint.gguf.keys import GRANITE, NUMBERS
from onward.checkpoint.gguf.metadata import FRACTIONS
from onward.checkpoint.gguf.reader import GgufTensor
from onward.checkpoint.gguf.types import TYPES
from onward.checkpoint.gguf.writer import Stored
from onward.ops import QuantizedWeight


def model_metadata(written: Written, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The numbers of a model. config: with all fields of its family (`Written.config`). name: for people."""
    family, prefix, head_dim = written.family, f"{written.architecture}.", head_dim_of(config)
    # llama.cpp opens no Granite without the key of logits, and without that of scores takes their width.
    values = dict.fromkeys(GRANITE, 1.0) | {field: value for field, value in config.items() if value is not None}
    values["head_dim"] = head_dim
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    numbers = [(field, key) for field, key in NUMBERS.items() if family.numbers.get(field, key) is not None]
    numbers += [(field, key) for field, key in family.numbers.items() if key is not None]
    own = {key: values[field] for field, key in numbers if field in values}
    own = {key: float(value) if key.endswith(FRACTIONS) else value for key, value in own.items()}
    own |= {"attention.value_length": head_dim, "vocab_size": config["vocab_size"]}
    types = config.get("layer_types") or []
    if "sliding_attention" in types:
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in types]
    own |= {f"rope.{key}": value for key, value in rope_metadata(config, head_dim or 0).items()}
    own |= family.said.write(config)
    metadata = {"general.architecture": written.architecture, "general.name": name}
    return metadata | {prefix + key: value for key, value in own.items() if value is not None}


def all_tensors(
    written: Written,
    config: Mapping[str, Any],
    completed: Mapping[str, Any],
    metadata: Mapping[str, Any],
    weights: Mapping[str, Tensor | QuantizedWeight],
) -> dict[str, Stored]:
    """`model_tensors` in the order that a reader of these metadata expects, and the tensors that RoPE has.

    Args:
        config: the checkpoint's config.json.
        completed: the same with all fields of its family.

    Raises:
        RequestError: as `model_tensors`.
    """
    head_dim = head_dim_of(completed)
    assert head_dim is not None, "an architecture was made of the config"
    rope = rope_tensors(completed, head_dim)
    fields = config_of(metadata, {name: _as_read(name, stored) for name, stored in rope.items()}, "the file")
    fields |= {"head_dim": head_dim_of(fields), "tie_word_embeddings": completed.get("tie_word_embeddings")}
    return model_tensors(written, config, fields, weights) | rope


def _as_read(name: str, stored: Stored) -> GgufTensor:
    type = next(type for type in TYPES.values() if type.name == stored.type)
    return GgufTensor(name, type, stored.shape, stored.data.view(torch.uint8).view(-1, stored.data.nbytes))
