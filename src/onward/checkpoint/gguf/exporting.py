"""A model in the Hugging Face layout -> the metadata of a GGUF file, as llama.cpp's converter makes them.

What `onward.checkpoint.gguf` reads from the file is what was written: the caller holds the architectures against each
other (`onward.checkpoint.convert`).
"""

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.gguf.config import head_dim_of
from onward.checkpoint.gguf.exporting_families import Written
from onward.checkpoint.gguf.exporting_rope import rope_metadata
from onward.checkpoint.gguf.keys import GRANITE, NUMBERS
from onward.checkpoint.gguf.metadata import FRACTIONS


def model_metadata(written: Written, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The numbers of a model. fields: `Written.fields`. name: for people."""
    family, prefix, head_dim = written.family, f"{written.architecture}.", head_dim_of(fields)
    # llama.cpp opens no Granite without the key of logits, and without that of scores takes their width.
    values = dict.fromkeys(GRANITE, 1.0) | {field: value for field, value in fields.items() if value is not None}
    values["head_dim"] = head_dim
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    numbers = [*NUMBERS.items(), *((field, key) for field, key in family.numbers.items() if key is not None)]
    own = {key: values[field] for field, key in numbers if field in values}
    own = {key: float(value) if key.endswith(FRACTIONS) else value for key, value in own.items()}
    own |= {"attention.value_length": head_dim, "vocab_size": fields.get("vocab_size")}
    types = fields.get("layer_types") or []
    if "sliding_attention" in types:
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in types]
    own |= {f"rope.{key}": value for key, value in rope_metadata(fields, head_dim or 0).items()}
    metadata = {"general.architecture": written.architecture, "general.name": name}
    return metadata | {prefix + key: value for key, value in own.items() if value is not None}
