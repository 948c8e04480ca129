"""A GGUF model: one file, or the parts that llama.cpp's gguf-split makes of one. Nothing else is needed."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint.chat_template import ChatTemplate
from onward.checkpoint.gguf.config import config_of, family_of, head_dim_of, unknown_keys_of
from onward.checkpoint.gguf.keys import SAMPLING
from onward.checkpoint.gguf.metadata import whole_numbers
from onward.checkpoint.gguf.names import gguf_name
from onward.checkpoint.gguf.reader import GgufFile, GgufTensor
from onward.checkpoint.gguf.vocabulary import NAMED_ENDS, Vocabulary
from onward.checkpoint.gguf.weights import read_gguf_weights
from onward.checkpoint.pages import releaser_of
from onward.checkpoint.tokenizer import JsonTokenizer
from onward.errors import CheckpointError, TokenizerError
from onward.models import Architecture
from onward.models.architecture import PartOfCheckpoint

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
TEMPLATE = "tokenizer.chat_template"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def is_gguf(path: Path) -> bool:
    """Whether this file's name is that of a GGUF model."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def parts_of(name: str) -> list[str]:
    """The names of all parts of a split model, in order, from that of one; the name alone where it is whole."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]


@dataclass(frozen=True)
class GgufCheckpoint:
    """What a `CheckpointFolder` is, out of a GGUF file. path: the file, or any part of a split one."""

    path: Path

    @cached_property
    def files(self) -> list[GgufFile]:
        """All parts, the first first.

        Raises:
            CheckpointError: a part is missing or damaged, or they are not of one model.
        """
        paths = [self.path.with_name(name) for name in parts_of(self.path.name)]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: a split GGUF model needs all its {len(paths)} parts")
        files = [GgufFile(path) for path in paths]
        for number, file in enumerate(files):
            count, at = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
            whole = len(files) == 1 and count == 0
            if type(count) is not int or not (count == len(files) or whole) or type(at) is not int or at != number:
                raise CheckpointError(
                    f"{file.path} says that it is part {at} of {count} (from 0), and its name that it is part {number} "
                    f"of {len(files)}: give the parts the names that they had"
                )
        return files

    @cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for file in self.files:
            for name, tensor in file.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{file.path}: tensor {name!r} is in another part, too")
                tensors[name] = tensor
        return tensors

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json that the model would have in the Hugging Face layout."""
        return config_of(self._metadata, self.tensors, self.path)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The sampling that the file advises; empty where it has no advice."""
        found = {field: self._metadata.get(f"general.sampling.{key}") for field, key in SAMPLING.items()}
        # A float32 as people write it: 0.7, not 0.699999988.
        shortest = {field: float(f"{value:.7g}") for field, value in found.items() if isinstance(value, float)}
        advice: dict[str, Any] = {field: value for field, value in (found | shortest).items() if value is not None}
        advice |= {"do_sample": True} if advice else {}
        suppressed = self._suppressed()
        return advice | ({"suppress_tokens": suppressed} if suppressed else {})

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """None where the file has no tokenizer: such a model takes and gives ids."""
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
        """The ids that end a text."""
        if self.vocabulary is not None:
            return self.vocabulary.ends
        named = [self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NAMED_ENDS]
        embedding = self.tensors.get("token_embd.weight")
        count = math.inf if embedding is None else embedding.shape[0]
        return tuple(id for id in named if type(id) is int and 0 <= id < count)

    @cached_property
    def unknown_keys(self) -> list[str]:
        """The names of metadata that are ignored because neither llama.cpp nor Onward knows them."""
        return unknown_keys_of(self._metadata, self.tensors, self.path)

    @cached_property
    def types(self) -> dict[str, int]:
        """The types of the matrices and how many weights each has, the most used first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                name, rows = tensor.type.name, len(tensor.rows)
                counts[name] = counts.get(name, 0) + rows * tensor.shape[-1]
        return dict(sorted(counts.items(), key=lambda entry: -entry[1]))

    def read_weights(
        self,
        config: Architecture,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        exact: bool = False,
        each_layer: Callable[[Any], Any] = lambda layer: layer,
    ) -> Any:
        """`read_gguf_weights` of this model."""
        family, fields = family_of(self._metadata, self.tensors, self.path), self.config
        fields = fields | {"head_dim": head_dim_of(fields)}
        ahead = self._metadata.get(f"{self._metadata['general.architecture']}.nextn_predict_layers", 0)
        # A layer has a tensor at least, whatever their number is said to be.
        ahead, first = min(ahead if isinstance(ahead, int) else 0, len(self.tensors)), fields["num_hidden_layers"]
        unread = [f"blk.{layer}." for layer in range(first, first + ahead)]  # they look further ahead
        if isinstance(config, PartOfCheckpoint):
            unread += [gguf_name(f"{start}weight", family).tensors[0] for start in config.unread]
        return read_gguf_weights(
            self.path,
            self.tensors,
            family,
            fields,
            config,
            unread=unread,
            dtype=dtype,
            device=device,
            exact=exact,
            each_layer=each_layer,
        )

    def page_releaser(self) -> Callable[[], None]:
        """`releaser_of` the files."""
        return releaser_of(file.path for file in self.files)

    @property
    def _metadata(self) -> dict[str, Any]:
        return self.files[0].metadata

    def _suppressed(self) -> list[int]:
        """Ids that are never generated; as in llama.cpp those past the vocabulary are ignored."""
        ids = whole_numbers(SUPPRESSED, self._metadata.get(SUPPRESSED)) or []
        count = 0 if self.vocabulary is None else len(self.vocabulary.tokens)
        return [id for id in ids if 0 <= id < count]

    def _template(self, name: str) -> str | None:
        source = self._metadata.get(name)
        if source is not None and not isinstance(source, str):
            raise TokenizerError(f"{self.path}: {name} must be text; got {type(source).__name__}")
        return source
