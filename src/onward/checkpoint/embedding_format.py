"""How a checkpoint makes embeddings, from its sentence-transformers files, and scores from a classifier's head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.safetensors import SafetensorsFolder
from onward.checkpoint.shards import read_object
from onward.errors import ConfigError
from onward.util.text_input import read_json_file

# Modules of sentence-transformers, by the last part of their type.
_RUN = ("Transformer", "Pooling", "Normalize", "LogitScore")
_POOLINGS = ("lasttoken", "mean", "weightedmean")
_HEAD = "score.weight"


@dataclass(frozen=True)
class EmbeddingFormat:
    """How to embed a text.

    pooling: "lasttoken", "mean", or "weightedmean", whose weights are 1, 2, … prompts: texts before a text, by name.
    default_prompt: the name of the one that applies by default. includes_prompt: whether the prompt's ids count in a
    mean. adds_eos: whether a text ends with the tokenizer's eos. max_tokens: the most ids of a text. dimensions: of an
    embedding by default; None keeps all.
    answers: the ids that say that a document is relevant ("yes") and, if not None, that it is not ("no").
    score: the head of a classifier with one label, float32 [D].
    problem: why the checkpoint's embeddings cannot be computed; "" if they can.
    """

    pooling: str = "lasttoken"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    includes_prompt: bool = True
    adds_eos: bool = False
    max_tokens: int | None = None
    dimensions: int | None = None
    answers: tuple[int, int | None] | None = None
    score: Tensor | None = None
    problem: str = ""


def read_embedding_format(folder: Path, tokenizer_config: Mapping[str, Any], *, is_classifier: bool) -> EmbeddingFormat:
    """The format that the files of a folder describe: modules.json with the files it names, and
    config_sentence_transformers.json. Without them, the last id's final norm is the embedding.

    Raises:
        ConfigError: a file cannot be read.
    """
    eos = tokenizer_config.get("add_eos_token") is True
    try:
        score = _score(folder) if is_classifier else None
        return EmbeddingFormat(**_fields(folder), adds_eos=eos, score=score)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{folder}: the files of sentence-transformers cannot be read: {error}") from error


def _fields(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (settings := folder / "config_sentence_transformers.json").is_file():
        config = read_object(settings, ConfigError)
        found["prompts"] = {name: text for name, text in (config.get("prompts") or {}).items() if text}
        found["default_prompt"] = config.get("default_prompt_name")
        found["dimensions"] = config.get("truncate_dim")
    if (settings := folder / "sentence_bert_config.json").is_file():
        config = read_object(settings, ConfigError)
        found["max_tokens"] = config.get("max_seq_length")
        if config.get("do_lower_case"):
            found["problem"] = "sentence_bert_config.json lowers the case of texts"
        if "message" in (config.get("modality_config") or {}):
            found["problem"] = "sentence_bert_config.json makes chat messages of texts"
    if not (folder / "modules.json").is_file():
        return found
    for module in read_json_file(folder / "modules.json"):
        kind = module["type"].rpartition(".")[2]
        file = folder / module["path"] / "config.json"
        if kind not in _RUN:
            found["problem"] = f"modules.json lists a {kind}, which Onward does not run"
        elif kind == "Pooling":
            found |= _pooling(read_object(file, ConfigError))
        elif kind == "LogitScore":
            config = read_object(file, ConfigError)
            found["answers"] = (config["true_token_id"], config.get("false_token_id"))
    return found


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a pooling's config: pooling_mode, or a flag for each mode."""
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]
        modes = [{"mean_tokens": "mean", "cls_token": "cls"}.get(mode, mode.removesuffix("_tokens")) for mode in modes]
    modes = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
    found: dict[str, Any] = {"pooling": modes[0], "includes_prompt": config.get("include_prompt", True)}
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        why = ", whose first token has seen no other" if modes == ["cls"] else ""
        found["problem"] = f"it pools with {' + '.join(modes)}{why}; a decoder pools with {', '.join(_POOLINGS)}"
    return found


def _score(folder: Path) -> Tensor | None:
    """The head of a classifier with one label; None without one."""
    weight = SafetensorsFolder(folder, None, torch.device("cpu")).find(_HEAD)
    return None if weight is None or weight.shape[0] != 1 else weight[0].to(torch.float32)
