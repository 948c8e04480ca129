"""A model in the Hugging Face layout -> the metadata and tensors of a GGUF file, as llama.cpp's converter makes them.

What `onward.checkpoint.gguf` reads from the file is what was written: the caller holds the architectures against each
other (`onward.checkpoint.convert`).
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.config import head_dim_of
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY
from onward.checkpoint.gguf.family import GgufFamily
from onward.checkpoint.gguf.keys import GRANITE, NUMBERS, YARN
from onward.checkpoint.gguf.layout import norms_less_one
from onward.checkpoint.gguf.names import gguf_name
from onward.checkpoint.gguf.split_texts import SPLITTINGS
from onward.checkpoint.gguf.vocabulary import _CONTROL, _NORMAL, _UNUSED, _USER
from onward.checkpoint.gguf.writer import Stored
from onward.checkpoint.tokenizer import JsonTokenizer
from onward.errors import RequestError
from onward.models.fields import positive_number
from onward.models.rope import Llama3, Unscaled, yarn_magnitude
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import GROUP

# What is written: the lines of the table that turn round by themselves.
_WRITTEN_LINES = (
    *("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2", "exaone4", "glm4", "granite"),
    *("granitemoe", "smollm3", "seed_oss", "glm4moe", "gpt-oss"),
)
_WITH_KEY = ("llama", "expert_count"), ("olmo2", "attention.sliding_window")
# An architecture of config.json -> GGUF's, and its line.
_WRITTEN: dict[str, tuple[str, GgufFamily]] = {
    **{FAMILIES[name].architecture: (name, FAMILIES[name]) for name in _WRITTEN_LINES},
    **{WITH_KEY[line].architecture: (line[0], WITH_KEY[line]) for line in _WITH_KEY},
    "MistralForCausalLM": ("llama", FAMILIES["llama"]),
}
# How the keys end whose numbers are no whole ones.
_FRACTIONS = ("epsilon", "scale", "softcapping")
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# GPT-2's expression, which `ByteLevel` applies by itself.
_BYTE_LEVEL = SPLITTINGS["gpt-2"].expressions


def line_of(config: Mapping[str, Any]) -> tuple[str, GgufFamily]:
    """GGUF's name of a config.json's architecture, and its line of the table.

    Raises:
        RequestError: it has none that is written.
    """
    (architecture,) = config.get("architectures") or [None]
    if architecture not in _WRITTEN:
        raise RequestError(f"{architecture} cannot be written as GGUF; these can: {', '.join(_WRITTEN)}")
    return _WRITTEN[architecture]


def model_metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The numbers of a model. config: of config.json. name: for people."""
    architecture, family = line_of(config)
    prefix, head_dim = f"{architecture}.", head_dim_of(config)
    metadata: dict[str, Any] = {"general.architecture": architecture, "general.name": name}
    # llama.cpp opens no Granite without the key of logits, and without that of scores takes their width.
    values = dict.fromkeys(GRANITE, 1.0) | {field: value for field, value in config.items() if value is not None}
    values["head_dim"] = head_dim
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    own = {field: key for field, key in family.numbers.items() if key is not None}
    for field, key in (*NUMBERS.items(), *own.items()):
        value = values.get(field)
        if value is not None:
            metadata[prefix + key] = float(value) if key.endswith(_FRACTIONS) else value
    metadata |= {f"{prefix}attention.value_length": head_dim, f"{prefix}vocab_size": config["vocab_size"]}
    types = config.get("layer_types") or []
    if "sliding_attention" in types:
        metadata[f"{prefix}attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in types]
    return metadata | {f"{prefix}rope.{key}": value for key, value in _rope_metadata(config, head_dim or 0).items()}


def _rope_metadata(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The keys behind "rope."."""
    rope = _rope(config)
    metadata = {
        "freq_base": float(positive_number(rope, "rope_theta", 10000.0)),
        "dimension_count": round(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    of_windows = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    base = of_windows.get("rope_theta", config.get("rope_local_base_freq"))
    metadata |= {} if base is None else {"freq_base_swa": float(base)}
    if rope.get("rope_type") in ("linear", "yarn"):
        metadata |= {"scaling.type": rope["rope_type"], "scaling.factor": float(rope["factor"])}
        if (original := rope.get("original_max_position_embeddings")) is not None:
            metadata["scaling.original_context_length"] = original
    return metadata | (_yarn_metadata(rope) if rope.get("rope_type") == "yarn" else {})


def _yarn_metadata(rope: Mapping[str, Any]) -> dict[str, float]:
    metadata = {f"scaling.{key}": float(rope[field]) for field, key in YARN.items() if rope.get(field) is not None}
    # llama.cpp reads another key than the attention_factor's: by how much that is more than what the factor means.
    usual = yarn_magnitude(float(rope["factor"]))
    times = float(rope.get("attention_factor") or usual) / usual
    return metadata if math.isclose(times, 1.0, rel_tol=2**-20) else metadata | {"scaling.attn_factor": times}


def model_tensors(config: Mapping[str, Any], weights: Mapping[str, Tensor | QuantizedWeight]) -> dict[str, Stored]:
    """The weights by GGUF's names. int4 becomes Q4_0, which holds the same numbers.

    Raises:
        RequestError: int8, or int4 whose rows are no whole groups: no type of GGUF holds these; experts of several
            types; or a weight of a norm that is not the same after 1 was added, in float32, and taken away.
    """
    (_, family), head_dim = line_of(config), head_dim_of(config)
    assert head_dim is not None, "an architecture was made of the config"
    tensors: dict[str, Stored] = {}
    stacks: dict[str, list[Stored]] = {}
    fields = dict(config) | {"head_dim": head_dim}
    for name, weight in weights.items():
        order = family.order(name, fields, weight.shape[0]).rows
        place = gguf_name(name, family)
        (tensor,) = place.tensors
        stored = _stored(name, _computed(name, weight, family), order)
        if place.expert is None:
            tensors[tensor] = stored
        else:
            stacks.setdefault(tensor, []).append(stored)
    tensors |= {tensor: _stacked(tensor, experts) for tensor, experts in stacks.items()}
    rope = _rope(config)
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(rope, head_dim)
    return tensors


def _computed(name: str, weight: Tensor | QuantizedWeight, family: GgufFamily) -> Tensor | QuantizedWeight:
    """What the converter computes of a weight, which reading must undo."""
    if isinstance(weight, QuantizedWeight) or family.values is not norms_less_one or not name.endswith("norm.weight"):
        return weight
    computed = weight.to(torch.float32) + 1
    if not torch.equal(family.values(name, computed).to(weight.dtype), weight):
        raise RequestError(
            f"{name}: GGUF has the weights of this norm plus 1 in float32, and what is left of them is not the same"
        )
    return computed


def _stacked(name: str, experts: list[Stored]) -> Stored:
    """One tensor of the matrices (or biases) of all experts, which are in their order."""
    first = experts[0]
    if types := sorted({expert.type for expert in experts} - {first.type}):
        raise RequestError(
            f"{name}: GGUF has one type for the matrices of all experts; these are {first.type} and {types[0]}: give a "
            "dtype, for floats"
        )
    return Stored(first.type, (len(experts), *first.shape), torch.stack([expert.data for expert in experts]))


def tokenizer_metadata(tokenizer: JsonTokenizer, vocab_size: int, template: str | None) -> dict[str, Any]:
    """The keys "tokenizer.…". vocab_size: of the model, which may have more ids than the tokenizer.

    Raises:
        RequestError: the tokenizer is no byte-level BPE, or cuts texts as none that GGUF names.
    """
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(parts.get("decoder")):
        raise RequestError("the tokenizer is no byte-level BPE, and others cannot be written as GGUF")
    added = {token["id"]: _CONTROL if token["special"] else _USER for token in parts["added_tokens"]}
    tokens, types = [], []
    for id, text in enumerate([*tokenizer.tokens(), *([None] * (vocab_size - tokenizer.vocab_size))]):
        tokens.append(f"[PAD{id}]" if text is None else text)
        types.append(_UNUSED if text is None else added.get(id, _NORMAL))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    begins = tokenizer.encode("")[:1] == [tokenizer.bos_id]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(parts),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": begins,
    }
    for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
        metadata |= {} if token is None else {f"tokenizer.ggml.{name}_token_id": token}
    return metadata | ({} if template is None else {"tokenizer.chat_template": template})


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_parameters of a config.json, of either spelling; those of full layers where layers have their own."""
    given = config.get("rope_parameters") or {}
    rope = dict(config.get("rope_scaling") or {}) | dict(given.get("full_attention", given))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _stored(name: str, weight: Tensor | QuantizedWeight, order: Tensor | None) -> Stored:
    """order: where its rows lie in the file (`Order`)."""
    if isinstance(weight, QuantizedWeight):
        rows, inputs = weight.shape
        if weight.format != "int4" or inputs % GROUP:
            raise RequestError(
                f"{name} is {weight.format} {[rows, inputs]}, which no type of GGUF holds: give a dtype, for floats"
            )
        return Stored("Q4_0", (rows, inputs), _put(_q4_0(weight), order))
    if weight.dim() == 1 or name.endswith(".bias"):
        weight = weight.to(torch.float32)
    return Stored(_FLOATS[weight.dtype], tuple(weight.shape), _put(weight, order))


def _put(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)


def _q4_0(weight: QuantizedWeight) -> Tensor:
    """uint8 [N, K / 32 * 18]: of each group a float16 scale, and bytes of inputs j (low half) and 16 + j, each + 8."""
    q, scales = weight.unpack()
    groups = (q.view(len(q), -1, GROUP) + 8).view(torch.uint8)
    halves = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    return torch.cat((scales.unsqueeze(-1).contiguous().view(torch.uint8), halves), -1).flatten(1)


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Stored:
    at, base = torch.zeros(1, 1, 1), float(rope["rope_theta"])  # any position
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    scaled = Llama3(float(rope["factor"]), low, high, int(rope["original_max_position_embeddings"]))
    plain = Unscaled().inverse_frequencies(head_dim, base, at, context=0)
    divisors = (plain / scaled.inverse_frequencies(head_dim, base, at, context=0)).flatten().to(torch.float32)
    return Stored("F32", tuple(divisors.shape), divisors)


def _splitting(parts: Mapping[str, Any]) -> str:
    """GGUF's name of how the tokenizer cuts texts."""
    cutter = parts.get("pre_tokenizer") or {}
    expressions: tuple[str, ...] = ()
    for step in cutter.get("pretokenizers", [cutter]):
        if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            expressions += (step["pattern"].get("Regex", ""),)
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            expressions += (r"\p{N}",)
        elif step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            expressions += _BYTE_LEVEL if step.get("use_regex", True) else ()
        else:
            expressions += (repr(step),)
    whole_words = bool(parts["model"].get("ignore_merges"))
    normalizer = (parts.get("normalizer") or {}).get("type")
    # A name says nothing of NFC: llama.cpp never normalizes, and readers of the Hugging Face layout do as the model's
    # makers did.
    for name, splitting in SPLITTINGS.items():
        if (splitting.expressions, splitting.whole_words) == (expressions, whole_words) and normalizer in (None, "NFC"):
            return name
    raise RequestError(
        f"the tokenizer cuts texts by {' and '.join(expressions) or 'nothing'}, for which GGUF has no name that Onward "
        f"knows; it knows {', '.join(SPLITTINGS)}"
    )
