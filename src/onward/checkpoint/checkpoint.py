"""The small files of a checkpoint folder, read and validated once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onward.chat.template import ChatTemplate
from onward.checkpoint.embedding_format import EmbeddingFormat, read_embedding_format
from onward.checkpoint.formats import methods_of, with_settings_file
from onward.checkpoint.safetensors import SafetensorsFolder
from onward.checkpoint.shards import METADATA, read_object, weight_files
from onward.checkpoint.stored_names import names_of
from onward.errors import ConfigError, OnwardError, TokenizerError, one_line, warn
from onward.models import read_config
from onward.models.families import with_architecture
from onward.models.fields import generation_fields
from onward.tokenizer.tokenizer import JsonTokenizer, token_text
from onward.util.text_input import read_text_file

# Tokenizer files of other libraries: SentencePiece, Mistral, tiktoken, and older transformers classes.
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder in the Hugging Face layout. Each file is read on first use."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, with defaults for its model_type, settings of a separate file, and an untied head if stored."""
        if not (self.path / "config.json").is_file():
            advice = "is it a model folder in the Hugging Face layout?"
            if (self.path / METADATA).is_file():
                advice = "put the model's beside the training checkpoint (docs/training.md)"
            if self._has("adapter_config.json"):
                base = self._read_json("adapter_config.json", ConfigError).get("base_model_name_or_path")
                advice = "it holds only an adapter; load the model that the adapter was trained on"
                advice += f" ({base})" if base else ""
            raise ConfigError(f"{self.path} has no config.json: {advice}")
        config = with_architecture(self._read_json("config.json", ConfigError))
        if not self.has_head:
            config = {**config, "tie_word_embeddings": True}  # nothing else is there to read
        config = with_settings_file(self.path, config)
        try:
            methods_of(config)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        return untied_if_stored(self.path, config)

    @cached_property
    def has_head(self) -> bool:
        """Whether it has a head over the vocabulary: not if it is a classifier, or a base model that ties none."""
        config = self._read_json("config.json", ConfigError)
        if self._is_classifier:
            return False
        architectures = config.get("architectures")
        is_base = (
            isinstance(architectures, list) and len(architectures) == 1 and str(architectures[0]).endswith("Model")
        )
        if not is_base or config.get("tie_word_embeddings") is not False or not weight_files(self.path):
            return True
        stored = SafetensorsFolder(self.path, None, torch.device("cpu"))
        return any(name.endswith("lm_head.weight") for name in stored.named())

    @property
    def _is_classifier(self) -> bool:
        architectures = self._read_json("config.json", ConfigError).get("architectures") or [""]
        return str(architectures[0]).endswith("ForSequenceClassification")

    @cached_property
    def embedding_format(self) -> EmbeddingFormat:
        """How the checkpoint makes embeddings and scores."""
        return read_embedding_format(self.path, self.tokenizer_config, is_classifier=self._is_classifier)

    @property
    def generation_file(self) -> str:
        """The file with generation settings: generation_config.json, or else config.json."""
        return "generation_config.json" if self._has("generation_config.json") else "config.json"

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or else config.json's generation settings, as in transformers."""
        if self._has("generation_config.json"):
            return self._read_json("generation_config.json", ConfigError)
        return generation_fields(self.config)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json merged over special_tokens_map.json, which older checkpoints have."""
        older = self._read_json("special_tokens_map.json", TokenizerError)
        return older | self._read_json("tokenizer_config.json", TokenizerError)

    @cached_property
    def tokenizer(self) -> JsonTokenizer | None:
        """None if the folder has no tokenizer.json: the model then works on token ids."""
        if not (self.path / "tokenizer.json").is_file():
            if others := [name for name in _OTHER_TOKENIZERS if self._has(name)]:
                warn(
                    f"{self.path}: {others[0]} is not supported, so this model works only on token ids: save it as a "
                    "tokenizer.json with transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
            return None
        return JsonTokenizer.read(self.path / "tokenizer.json", self.tokenizer_config)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """From chat_template.jinja, tokenizer_config.json or chat_template.json, in this order."""
        files = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
        sources = {name: self._read_text(file) for name, file in files.items() if self._has(file)}
        sources = sources or self._configured_templates()
        if not sources:
            return None
        if "default" not in sources:
            warn(f"{self.path}: no chat template is named 'default' among {', '.join(sources)}: chat is not available")
            return None
        tokens = {
            name: text
            for name, value in self.tokenizer_config.items()
            if name.endswith("_token") and (text := token_text(value)) is not None
        }
        return ChatTemplate(sources["default"], tokens, sources.get("tool_use"))

    @cached_property
    def eos(self) -> tuple[int, ...]:
        """The ids of end-of-text tokens: from generation_config.json, config.json or the tokenizer."""
        sources = {self.generation_file: self.generation_config}
        sources |= {} if "config.json" in sources else {"config.json": generation_fields(self.config)}
        for name, config in sources.items():
            if (eos := config.get("eos_token_id")) is None:
                continue
            ids = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
                raise ConfigError(f"{name}: eos_token_id must be an id or a list of ids; got {eos!r}")
            return tuple(ids)
        from_tokenizer = self.tokenizer.eos_id if self.tokenizer is not None else None
        return () if from_tokenizer is None else (from_tokenizer,)

    def _configured_templates(self) -> dict[str, str]:
        """A template is a string, a list of {"name": …, "template": …}, or an object of names and templates."""
        config = self.tokenizer_config.get("chat_template")
        config = config or self._read_json("chat_template.json", TokenizerError).get("chat_template") or []
        entries = [{"name": "default", "template": config}] if isinstance(config, str) else config
        try:
            if not isinstance(entries, dict):
                entries = {entry["name"]: entry["template"] for entry in entries}
            templates = dict(entries)
        except (TypeError, KeyError):
            templates = {"default": None}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TokenizerError(
                f"{self.path}: tokenizer_config.json: chat_template must be a string, a list of "
                f"{{'name': …, 'template': …}}, or an object of names and templates; got {type(config).__name__}"
            )
        return templates

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def _read_text(self, name: str) -> str:
        try:
            return read_text_file(self.path / name)
        except (ValueError, OSError) as error:
            raise TokenizerError(f"{self.path / name} cannot be read as UTF-8 text: {one_line(error)}") from error

    def _read_json(self, name: str, kind: type[OnwardError]) -> dict[str, Any]:
        """A JSON object, empty if the file is absent; raises an error of `kind` for anything else."""
        return read_object(self.path / name, kind) if self._has(name) else {}


def untied_if_stored(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, untied if the safetensors hold a head of their own, as in transformers. Readers report errors."""
    try:
        if not weight_files(folder) or not _has_own_head(folder, config):
            return dict(config)
        own = {**config, "tie_word_embeddings": False}
        if read_config(own).tie_word_embeddings:
            return dict(config)
    except OnwardError:
        return dict(config)
    warn(
        f"{folder}: config.json ties the head to the embedding, but the weights hold two different ones: they are not "
        "tied (set tie_word_embeddings to false to silence this)"
    )
    return own


def _has_own_head(folder: Path, config: Mapping[str, Any]) -> bool:
    architecture = read_config(config)
    names = names_of(architecture)
    if names is None or not architecture.tie_word_embeddings:
        return False
    stored = SafetensorsFolder(folder, None, torch.device("cpu"), config=architecture)
    embedding, head = (stored.find(f"{name}.weight") for name in (names.embed_tokens, names.lm_head))
    if embedding is None or head is None or embedding.shape != head.shape:
        return False
    return not torch.equal(embedding, head)
