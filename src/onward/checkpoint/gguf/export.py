"""Write a Hugging Face model as a GGUF file: metadata and tensors as llama.cpp's converter makes them."""

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.gguf.checkpoint import TEMPLATE
from onward.checkpoint.gguf.config import head_dim_of
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY
from onward.checkpoint.gguf.family import GgufFamily, gguf_name
from onward.checkpoint.gguf.keys import GRANITE, LENGTHS, NUMBERS, SAMPLING, YARN
from onward.checkpoint.gguf.pretokenizer import SPLITTINGS
from onward.checkpoint.gguf.reader import FRACTIONS, MAGIC, TYPES
from onward.checkpoint.gguf.vocabulary import CONTROL, NAMED_ENDS, NORMAL, SPECIAL, UNUSED, USER, known_ends
from onward.errors import RequestError, warn
from onward.models.fields import positive_number
from onward.models.rope import Llama3, Unscaled, rope_fields, rotary_schedule, yarn_magnitude
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import GROUP
from onward.tokenizer.tokenizer import JsonTokenizer, check_vocabulary, token_text
from onward.util.checks import is_finite

# The end of an error about a model that cannot be written.
OTHER_WAY = (
    "For llama.cpp, run `onward convert MODEL FOLDER --to safetensors` and then llama.cpp's "
    "`convert_hf_to_gguf.py FOLDER`"
)


class ExportFamily(NamedTuple):
    """architecture: GGUF's name. needs_head: llama.cpp requires a head, so a tied one is written as a copy."""

    architecture: str
    family: GgufFamily
    needs_head: bool = False

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of the written model."""
        return {**config, **({"tie_word_embeddings": False} if self.needs_head else {})}


# Families that can be written from their table entry alone.
_PLAIN = (*("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "exaone4", "granite", "granitemoe", "smollm3", "seed_oss"),)
WRITTEN: dict[str, ExportFamily] = {
    **{FAMILIES[name].architecture: ExportFamily(name, FAMILIES[name]) for name in _PLAIN},
    "MistralForCausalLM": ExportFamily("llama", FAMILIES["llama"]),
    "MixtralForCausalLM": ExportFamily("llama", WITH_KEY["llama", "expert_count"]),
    "Olmo2ForCausalLM": ExportFamily("olmo2", FAMILIES["olmo2"], needs_head=True),
    "Olmo3ForCausalLM": ExportFamily("olmo2", WITH_KEY["olmo2", "attention.sliding_window"], needs_head=True),
}


def export_family(config: Mapping[str, Any]) -> ExportFamily:
    (architecture,) = config["architectures"]
    if architecture not in WRITTEN:
        raise RequestError(f"{architecture} cannot be written as GGUF; these can: {', '.join(WRITTEN)}. {OTHER_WAY}")
    return WRITTEN[architecture]


def model_metadata(export: ExportFamily, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The metadata for a model's config. fields: from `ExportFamily.fields`. name: for display."""
    family, prefix, head_dim = export.family, f"{export.architecture}.", head_dim_of(fields)
    # llama.cpp requires the key for logits from Granite, and has another default for the attention scale.
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
    metadata = {"general.architecture": export.architecture, "general.name": name}
    return metadata | {prefix + key: value for key, value in own.items() if value is not None}


_VERSION, _ALIGNMENT = 3, 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NUMBERS = {block.name: number for number, block in TYPES.items()}


class ExportedTensor(NamedTuple):
    """A tensor to write. type: a name in `TYPES`. shape: outermost first. data: its bytes, in any dtype."""

    type: str
    shape: tuple[int, ...]
    data: Tensor


def write_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, ExportedTensor]) -> None:
    """Write a file. metadata: strings, booleans, 32-bit integers, floats, or lists of one of these."""
    head = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for name, value in metadata.items():
        head += [_text(name), *_value(value)]
    offset = 0
    for name, stored in tensors.items():
        sizes = struct.pack(f"<I{len(stored.shape)}Q", len(stored.shape), *reversed(stored.shape))
        head += [_text(name), sizes, struct.pack("<IQ", _NUMBERS[stored.type], offset)]
        offset += _padded(stored.data.nbytes)
    text = b"".join(head)
    with file.open("wb") as out:
        out.write(text + bytes(_padded(len(text)) - len(text)))
        for stored in tensors.values():
            out.write(stored.data.contiguous().view(torch.uint8).numpy().data)
            out.write(bytes(_padded(stored.data.nbytes) - stored.data.nbytes))
        out.flush()
        os.fsync(out.fileno())


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{text[:80]!r} is not valid Unicode, which GGUF requires") from error
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> Iterable[bytes]:
    if isinstance(value, list):
        # llama.cpp reads token types only as int32, and other integer lists as either. Only merges can be empty, and
        # they are strings.
        whole = bool(value) and all(type(item) is int for item in value)
        kind, one = (_INT32, struct.Struct("<i").pack) if whole else _kind(value)
        return [struct.pack("<IIQ", _ARRAY, kind, len(value)), *(one(item) for item in value)]
    kind, one = _kind([value])
    return [struct.pack("<I", kind), one(value)]


def _kind(values: Sequence[Any]) -> tuple[int, Any]:
    """The type number of values, and the function that packs one."""
    if all(isinstance(value, str) for value in values):
        return _STRING, _text
    if all(isinstance(value, bool) for value in values):
        return _BOOL, struct.Struct("<?").pack
    if all(isinstance(value, int) for value in values):
        negative = any(value < 0 for value in values)
        return (_INT32, struct.Struct("<i").pack) if negative else (_UINT32, struct.Struct("<I").pack)
    return _FLOAT32, struct.Struct("<f").pack


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_parameters of a config.json, in either spelling; of full attention if they differ between layers."""
    rope = config.get("rope_parameters") or {}
    rope = rope_fields({**config, "rope_parameters": rope.get("full_attention", rope)})
    return {"rope_theta": 10000.0, "rope_type": "default"} | rope


def rope_metadata(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    rope = rope_of(config)
    metadata = {
        "freq_base": float(positive_number(rope, "rope_theta", 10000.0)),
        "dimension_count": round(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    if "rope_theta" in sliding:
        metadata["freq_base_swa"] = float(sliding["rope_theta"])
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        metadata |= {"scaling.type": kind, "scaling.factor": float(rope["factor"])}
    if kind in ("linear", "yarn", "longrope") and original is not None:
        metadata["scaling.original_context_length"] = original
    if kind == "longrope":
        schedule = rotary_schedule({"rope_parameters": rope}, head_dim, config["max_position_embeddings"], partial=1.0)
        metadata["scaling.attn_factor"] = schedule.scaling.magnitude
    return metadata | (_yarn_metadata(rope) if kind == "yarn" else {})


def rope_tensors(config: Mapping[str, Any], head_dim: int) -> dict[str, ExportedTensor]:
    """Frequency divisors, which are stored as tensors."""
    rope = rope_of(config)
    divisors: dict[str, Tensor] = {}
    if rope["rope_type"] == "llama3":
        divisors["rope_freqs.weight"] = _llama3_divisors(rope, head_dim)
    if rope["rope_type"] == "longrope":
        for length in LENGTHS:
            divisors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
    return {name: ExportedTensor("F32", tuple(values.shape), values) for name, values in divisors.items()}


def _yarn_metadata(rope: Mapping[str, Any]) -> dict[str, float]:
    metadata = {f"scaling.{key}": float(rope[field]) for field, key in YARN.items() if rope.get(field) is not None}
    # llama.cpp reads the attention factor relative to the one that the scaling factor implies.
    usual = yarn_magnitude(float(rope["factor"]))
    times = float(rope.get("attention_factor") or usual) / usual
    return metadata if math.isclose(times, 1.0, rel_tol=2**-20) else metadata | {"scaling.attn_factor": times}


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    at, base = torch.zeros(1, 1, 1), float(rope["rope_theta"])  # any position
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    scaled = Llama3(float(rope["factor"]), low, high, int(rope["original_max_position_embeddings"]))
    plain = Unscaled().inverse_frequencies(head_dim, base, at, context=0)
    return (plain / scaled.inverse_frequencies(head_dim, base, at, context=0)).flatten().to(torch.float32)


# Onward's formats -> GGUF types with the same values.
_BLOCKS = {"int4": "Q4_0", "iq4_nl": "IQ4_NL"}
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def model_tensors(
    export: ExportFamily, fields: Mapping[str, Any], weights: Mapping[str, Tensor | QuantizedWeight]
) -> dict[str, ExportedTensor]:
    """The tensors of the model and its RoPE. int4 becomes Q4_0 and iq4_nl IQ4_NL, which hold the same values."""
    head_dim = head_dim_of(fields)
    assert head_dim is not None, "the config was valid"
    if export.needs_head:
        weights = {**weights, "lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}
    tensors: dict[str, ExportedTensor] = {}
    experts: dict[str, list[ExportedTensor]] = {}
    for name, weight in weights.items():
        place = gguf_name(name, export.family)
        if place.tensors == (name,):
            raise RequestError(f"GGUF has no name for {name!r} in this family")
        (tensor,) = place.tensors
        stored = _stored(name, weight)
        order = export.family.order(name, {**fields, "head_dim": head_dim}, stored.shape[0])
        if order.rows is not None:
            stored = stored._replace(data=torch.empty_like(stored.data).index_copy_(0, order.rows, stored.data))
        if place.expert is None:
            tensors[tensor] = stored
        else:
            experts.setdefault(tensor, []).append(stored)
    return tensors | {name: _stacked(name, parts) for name, parts in experts.items()} | rope_tensors(fields, head_dim)


def _stored(name: str, weight: Tensor | QuantizedWeight) -> ExportedTensor:
    """Quantized blocks by row, float matrices unchanged, and vectors and biases in float32, as llama.cpp requires."""
    if isinstance(weight, Tensor):
        if weight.dim() == 1 or name.endswith(".bias"):
            weight = weight.to(torch.float32)
        return ExportedTensor(_FLOATS[weight.dtype], tuple(weight.shape), weight.contiguous())
    rows, inputs = weight.shape
    if weight.format not in _BLOCKS or inputs % GROUP:
        raise RequestError(f"{name}: no GGUF type holds {weight.format} {[rows, inputs]}: choose a float dtype")
    return ExportedTensor(_BLOCKS[weight.format], (rows, inputs), _blocks(weight))


def _stacked(name: str, experts: list[ExportedTensor]) -> ExportedTensor:
    first = experts[0]
    if types := sorted({expert.type for expert in experts} - {first.type}):
        raise RequestError(f"{name}: its experts have types {first.type} and {types[0]}: choose a float dtype")
    return ExportedTensor(first.type, (len(experts), *first.shape), torch.stack([expert.data for expert in experts]))


def _blocks(weight: QuantizedWeight) -> Tensor:
    """uint8 [N, K / 32 * 18]: for each group a float16 scale, and bytes with the codes of inputs j (low half) and
    16 + j: the integer of int4 plus 8, or an index into the table."""
    q, scales = weight.unpack()
    codes = q + 8 if weight.format == "int4" else q
    groups = codes.view(torch.uint8).view(len(q), -1, GROUP)
    halves = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    return torch.cat((scales.unsqueeze(-1).contiguous().view(torch.uint8), halves), -1).flatten(1)


# transformers' defaults for generation_config.json; llama.cpp's differ.
_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


def texts_metadata(checkpoint: CheckpointFolder, vocab_size: int) -> dict[str, Any]:
    """The keys "tokenizer.…" and "general.sampling.…". vocab_size: the model's, which may exceed the tokenizer's."""
    tokenizer, ends = checkpoint.tokenizer, checkpoint.eos
    check_vocabulary(checkpoint.path, vocab_size, tokenizer, ends)
    sampling = _sampling(checkpoint.generation_config)
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"} | _ends(ends) | sampling  # llama.cpp requires the key
    metadata = tokenizer_metadata(tokenizer, vocab_size)
    tokens = metadata["tokenizer.ggml.tokens"]
    # Templates may use these besides the BOS and EOS.
    texts = {name: token_text(checkpoint.tokenizer_config.get(f"{name}_token")) for name in ("unk", "pad")}
    ids = {name: tokens.index(text) for name, text in texts.items() if text in tokens}
    ids |= {} if tokenizer.bos_id is None else {"bos": tokenizer.bos_id}
    metadata |= {f"tokenizer.ggml.{SPECIAL[name]}_token_id": id for name, id in ids.items()}
    return metadata | _ends(ends, tokenizer.eos_id, known_ends(tokens)) | _templates(checkpoint) | sampling


def _ends(ends: Sequence[int], named: int | None = None, known: Collection[int] = ()) -> dict[str, int]:
    """The keys for end-of-text ids. named: the tokenizer's EOS. known: ids whose text already marks them as ends."""
    first = ends[:1] if named is None else [named]
    ids = [*first, *(id for id in dict.fromkeys(ends) if id not in (*first, *known))]
    if len(ids) > len(NAMED_ENDS):
        raise RequestError(
            f"the end-of-text ids are {', '.join(map(str, ids))}, and GGUF has keys for {len(NAMED_ENDS)}: remove "
            "unneeded ones from eos_token_id in generation_config.json or config.json"
        )
    return {f"tokenizer.ggml.{name}_token_id": id for name, id in zip(NAMED_ENDS, ids, strict=False)}


def _templates(checkpoint: CheckpointFolder) -> dict[str, Any]:
    source, *tools = (None,) if checkpoint.chat_template is None else checkpoint.chat_template.sources
    metadata = {} if source is None else {TEMPLATE: source}
    return metadata | ({f"{TEMPLATE}s": ["tool_use"], f"{TEMPLATE}.tool_use": tools[0]} if tools else {})


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of a generation_config.json; empty for greedy or beam search."""
    if generation.get("do_sample") is not True or generation.get("num_beams") not in (None, 1):
        return {}
    own = {name: generation[name] for name in _SAMPLING_DEFAULTS if is_finite(generation.get(name))}
    values = {name: type(_SAMPLING_DEFAULTS[name])(value) for name, value in (_SAMPLING_DEFAULTS | own).items()}
    return {f"general.sampling.{SAMPLING[name]}": value for name, value in values.items()}


# GPT-2's expression, which `ByteLevel` applies itself.
_BYTE_LEVEL = SPLITTINGS["gpt-2"].expressions


def tokenizer_metadata(tokenizer: JsonTokenizer, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's keys without special ids. vocab_size: the model's, which may exceed the tokenizer's."""
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(parts.get("decoder")):
        raise RequestError(f"only byte-level BPE tokenizers can be written as GGUF. {OTHER_WAY}")
    _check_added(parts["added_tokens"])
    added = {token["id"]: CONTROL if token["special"] else USER for token in parts["added_tokens"]}
    tokens, types = [], []
    for id, text in enumerate([*tokenizer.tokens(), *([None] * (vocab_size - tokenizer.vocab_size))]):
        tokens.append(f"[PAD{id}]" if text is None else text)
        types.append(UNUSED if text is None else added.get(id, NORMAL))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(parts),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer),
    }


def _check_added(added: Sequence[Mapping[str, Any]]) -> None:
    for token in added:
        if ways := [way for way in ("lstrip", "rstrip", "single_word") if token.get(way)]:
            raise RequestError(
                f"tokenizer.json: GGUF cannot express {' and '.join(ways)} of the added token {token['content']!r}"
            )


def _adds_bos(tokenizer: JsonTokenizer) -> bool:
    """Whether the tokenizer adds a BOS; warns if it adds other tokens too."""
    around = tokenizer.encode("")
    adds_bos = around[:1] == [tokenizer.bos_id]
    if others := around[adds_bos:]:
        warn(
            f"the tokenizer adds {' '.join(str(tokenizer.tokens()[id]) for id in others)} to each text, which GGUF "
            "cannot express, so the file's tokenizer does not; chat templates are unaffected"
        )
    return adds_bos


def _splitting(parts: Mapping[str, Any]) -> str:
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
    normalizer = parts.get("normalizer") or {"type": "Sequence", "normalizers": []}
    # Names do not cover NFC: llama.cpp never normalizes, and Hugging Face tokenizers do as the model's authors did.
    if normalizer.get("normalizers", [normalizer]) not in ([], [{"type": "NFC"}]):
        raise RequestError(
            f"tokenizer.json: normalizer is {str(normalizer)[:200]}, and GGUF supports only NFC for byte-level BPE"
        )
    for name, splitting in SPLITTINGS.items():
        if (splitting.expressions, splitting.whole_words) == (expressions, whole_words):
            return name
    raise RequestError(
        f"the tokenizer splits text by {' and '.join(expressions) or 'nothing'}, for which Onward knows no GGUF name; "
        f"known are {', '.join(SPLITTINGS)}"
    )
