"""A GGUF model: one file, or the parts that llama.cpp's gguf-split makes of it. No other file is needed."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.chat.template import ChatTemplate
from onward.checkpoint.gguf import blocks
from onward.checkpoint.gguf.config import config_and_keys, family_of, head_dim_of
from onward.checkpoint.gguf.family import GgufFamily, GgufName, RowOrder, blocks_of, gguf_name
from onward.checkpoint.gguf.keys import SAMPLING, unknown_keys
from onward.checkpoint.gguf.reader import GgufFile, GgufTensor, whole_numbers
from onward.checkpoint.gguf.vocabulary import NAMED_ENDS, Vocabulary
from onward.checkpoint.shards import placed, releaser_of
from onward.errors import CheckpointError, TokenizerError
from onward.models import Architecture, WeightScope
from onward.models.architecture import PartOfCheckpoint
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import data_shape
from onward.tokenizer.tokenizer import JsonTokenizer

# Tensors that become fields of config.json.
_CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Weights converted at a time, so that temporaries stay in the CPU cache.
_AT_ONCE = 2**20


def _default_dtype(tensors: Mapping[str, GgufTensor]) -> torch.dtype:
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F16", "F32"} else torch.bfloat16


class GgufTensors:
    """The weights of a model by stock name; tracks which were read.

    path: the file, for errors. tensors: by GGUF name. fields: of config.json. dtype: of norms, biases and activations;
    None uses bfloat16 if there are blocks, or else the embedding's. device: on "meta" no weight is read. exact: return
    floats that the dtype cannot hold as float32.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, GgufTensor],
        family: GgufFamily,
        fields: Mapping[str, Any],
        dtype: torch.dtype | None,
        device: torch.device,
        exact: bool,
    ) -> None:
        self._path, self._tensors, self._family, self._fields = path, tensors, family, fields
        self._dtype, self._device, self._exact = dtype or _default_dtype(tensors), device, exact
        # The experts that were read from each tensor; None: the whole tensor.
        self._consumed: dict[str, set[int | None]] = {name: {None} for name in _CONFIG_TENSORS}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        place = gguf_name(name, self._family)
        if len(place.tensors) > 1:
            return self._joined(name, place, shape, dtype)
        stored = self._find(place.tensors[0], name, shape)
        if math.prod(stored.shape) < math.prod(shape):  # checked before an order of rows takes memory
            raise self._shape_error(stored, shape)
        order = self._family.order(name, self._fields, shape[0])
        return self._ordered(name, self._part(stored, place.expert, shape, order.stored_rows), order, dtype)

    def _ordered(self, name: str, stored: GgufTensor, order: RowOrder, dtype: torch.dtype | None) -> Any:
        block_order = None if order.columns is None else blocks_of(order.columns, stored.type.weights)
        packed = dtype is None and self._packs(stored) and (order.columns is None or block_order is not None)
        if self._device.type == "meta":
            return self._empty(stored, packed)
        rows = stored.rows if len(stored.shape) > 1 else stored.rows.reshape(-1, stored.type.size)
        rows = rows if order.rows is None else rows[order.rows]
        if packed:
            if block_order is not None:
                rows = rows.view(len(rows), -1, stored.type.size)[:, block_order].flatten(1)
            try:
                return blocks.pack_blocks(stored.type, rows, self._dtype)
            except CheckpointError as error:
                raise CheckpointError(f"{self._path}: tensor {stored.name!r}: {error}") from error
        values = self._values(stored, rows)
        if order.columns is not None:
            values = values[:, order.columns]
        values = self._family.stock_values(name, values).reshape(stored.shape)
        return placed(self._path, stored.name, values, dtype or self._dtype_of(values), self._device)

    def _joined(self, name: str, place: GgufName, shape: tuple[int, ...], dtype: torch.dtype | None) -> Any:
        """A weight that the file splits into several tensors; it stays packed if they are stacked and of one type."""
        parts = [self._find(tensor, name, shape) for tensor in place.tensors]
        if _joined_shape(place, parts) != shape:
            shapes = " and ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(f"{self._path}: {name!r} is {shapes}, but the metadata expects {list(shape)}")
        for part in parts:
            self._consumed[part.name] = {None}
        if place.by is torch.cat and len({part.type for part in parts}) == 1:
            rows = torch.cat([part.rows for part in parts])
            return self._ordered(name, parts[0]._replace(shape=shape, rows=rows), RowOrder(), dtype)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        values = place.by([self._values(part, part.rows).view(part.shape) for part in parts])
        values = self._family.stock_values(name, values)
        return placed(self._path, name, values, dtype or self._dtype_of(values), self._device)

    def _dtype_of(self, values: Tensor) -> torch.dtype:
        """The model's dtype, or with `exact` one that holds the values."""
        if not self._exact or torch.equal(values.to(self._dtype).to(values.dtype), values):
            return self._dtype
        return torch.float32

    def _find(self, tensor: str, name: str, shape: tuple[int, ...]) -> GgufTensor:
        if tensor not in self._tensors:
            raise CheckpointError(f"{self._path}: tensor {tensor!r} ({name!r}) of shape {list(shape)} is missing")
        return self._tensors[tensor]

    def _shape_error(self, stored: GgufTensor, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: tensor {stored.name!r} has shape {list(stored.shape)}, but the metadata expects "
            f"{list(shape)}"
        )

    def _part(
        self, stored: GgufTensor, expert: int | None, shape: tuple[int, ...], stored_rows: int | None
    ) -> GgufTensor:
        """A tensor, or one expert's part, in the weight's shape, with all rows that the weight is selected from."""
        rows = stored_rows or shape[0]
        whole = (rows, *shape[1:]) if expert is None else (max(stored.shape[0], expert + 1), rows, *shape[1:])
        if not _matches(stored.shape, whole):
            raise self._shape_error(stored, whole)
        self._consumed.setdefault(stored.name, set()).add(expert)
        if expert is None:
            return stored._replace(shape=shape)
        return stored._replace(shape=shape, rows=stored.rows[expert * rows : (expert + 1) * rows])

    def _packs(self, stored: GgufTensor) -> bool:
        """float32 requires exact products, and only the CPU has kernels for packed weights."""
        packable = len(stored.shape) == 2 and blocks.packed_format(stored.type, stored.shape[1]) is not None
        return packable and self._dtype != torch.float32 and self._device.type in ("cpu", "meta")

    def _empty(self, stored: GgufTensor, packed: bool) -> Any:
        if not packed:
            return torch.empty(stored.shape, dtype=self._dtype, device=self._device)
        shape = stored.shape[0], stored.shape[1]
        format = blocks.packed_format(stored.type, shape[1])
        assert format is not None
        data = torch.empty(data_shape(format, shape), dtype=torch.uint8, device=self._device)
        return QuantizedWeight(data, format, shape, self._dtype)

    def check_all_read(self, unread: Sequence[str]) -> None:
        """Raise if a tensor was not read. unread: prefixes of tensors that are not part of the model."""
        left = sorted(name for name in set(self._tensors) - set(self._consumed) if not name.startswith(tuple(unread)))
        if left:
            raise CheckpointError(f"{self._path}: {len(left)} tensors do not belong to the model, such as {left[0]!r}")
        for name, experts in self._consumed.items():
            stored = self._tensors.get(name)
            if stored is not None and None not in experts and stored.shape[0] != len(experts):
                experts_of = f"{stored.shape[0]} experts, but the metadata says {len(experts)}"
                raise CheckpointError(f"{self._path}: tensor {name!r} has {experts_of}")

    def _values(self, stored: GgufTensor, rows: Tensor) -> Tensor:
        """Rows as floats [N, K]: stored floats unchanged, or blocks in the model's dtype."""
        floats = blocks.float_rows(stored.type, rows)
        if floats is not None:
            return floats
        inputs = rows.shape[1] // stored.type.size * stored.type.weights
        values = torch.empty((len(rows), inputs), dtype=self._dtype)
        step = max(1, _AT_ONCE // inputs)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            if not blocks.scales_are_finite(stored.type, blocks.read_parts(stored.type, part)):
                raise CheckpointError(f"{self._path}: tensor {stored.name!r} has scales that are not finite")
            values[first : first + step] = blocks.dequantized(stored.type, part)
        return values


def _matches(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor may hold weights of this shape: the converter adds, removes and splits dimensions."""
    if len(shape) == 1:
        return math.prod(stored) == shape[0]
    return [size for size in stored if size > 1] == [size for size in shape if size > 1]


def _joined_shape(place: GgufName, parts: Sequence[GgufTensor]) -> tuple[int, ...] | None:
    """The shape of a weight's joined tensors; None if they do not match."""
    try:
        return tuple(place.by([torch.empty(part.shape, device="meta") for part in parts]).shape)
    except (IndexError, RuntimeError):  # too few dimensions, or sizes that differ
        return None


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
