"""Held-out loss by kind, agreement of the draft with the target, and the comparison with transformers.

Everything here uses the exported folders, so the measured models are the shipped ones.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import END_OF_TEXT, KINDS
from .model import ModelConfig, Transformer
from .tokenizer import token_id


@dataclass(frozen=True)
class KindScore:
    """The number of scored tokens of one kind, and the sum of their losses in nats."""

    documents: int = 0
    tokens: int = 0
    nats: float = 0.0

    @property
    def loss(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def plus(self, nats: Tensor) -> KindScore:
        return KindScore(self.documents + 1, self.tokens + nats.numel(), self.nats + float(nats.double().sum()))


def read_heldout(path: Path) -> list[tuple[str, str]]:
    """The held-out documents with their kinds, which are recognized by their form."""
    texts = path.read_text(encoding="utf-8").split(f"{END_OF_TEXT}\n")
    return [(kind_of(text), text) for text in texts if text]


def kind_of(text: str) -> str:
    if text.startswith("<|im_start|>"):
        return "tools" if "Tools:\n{" in text.partition("<|im_end|>")[0] else "chat"
    if "\nQuestion: " in text:
        return "qa"
    return "json" if '\n{"' in text else "story"


def load_exported(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The exported model in the training code, its bfloat16 weights computed in `dtype`."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        rms_norm_eps=raw["rms_norm_eps"],
    )
    model = Transformer(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Evaluation:
    """The scores of both models by kind, and the share of equal greedy choices."""

    target: dict[str, KindScore]
    draft: dict[str, KindScore]
    agreement: dict[str, float]
    accepted_in_a_row: float
    right_answers: dict[str, tuple[int, int]]


@torch.no_grad()
def evaluate(
    target: Transformer, draft: Transformer, tokenizer: Tokenizer, heldout: Sequence[tuple[str, str]]
) -> Evaluation:
    """Score every document that fits the context, with <|endoftext|> as its last token.

    Agreement is the share of positions where both argmaxes are equal, given the true prefix: the
    acceptance of one greedy draft token. `accepted_in_a_row` is the mean run of equal choices that
    begins at a position, capped at 4, which is what a draft of four tokens would gain at most.
    """
    end = token_id(tokenizer, END_OF_TEXT)
    limit = target.config.max_position_embeddings
    scores = {name: dict.fromkeys((*KINDS, "all"), KindScore()) for name in ("target", "draft")}
    equal: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    answers: dict[str, list[bool]] = {"questions": [], "JSON": []}
    runs: list[Tensor] = []
    for kind, text in heldout:
        encoding = tokenizer.encode(text)
        ids = torch.tensor([*encoding.ids, end])[: limit + 1]
        choices = []
        for name, model in (("target", target), ("draft", draft)):
            logits = model(ids[None, :-1])[0].float()
            nats = F.cross_entropy(logits, ids[1:], reduction="none")
            for key in (kind, "all"):
                scores[name][key] = scores[name][key].plus(nats)
            choices.append(logits.argmax(-1))
        for what, start, stop in answer_spans(kind, text):
            span = [i for i, (left, right) in enumerate(encoding.offsets) if right > start and right <= stop]
            if span and span[-1] < len(ids):
                positions = torch.tensor(span)
                answers[what].append(bool((choices[0][positions - 1] == ids[positions]).all()))
        same = choices[0] == choices[1]
        equal[kind].append(same)
        runs.append(_runs(same, 4))
    agreement = {kind: _share(torch.cat(parts)) for kind, parts in equal.items() if parts}
    agreement["all"] = _share(torch.cat([part for parts in equal.values() for part in parts]))
    right = {what: (sum(flags), len(flags)) for what, flags in answers.items()}
    return Evaluation(scores["target"], scores["draft"], agreement, float(torch.cat(runs).float().mean()), right)


def answer_spans(kind: str, text: str) -> list[tuple[str, int, int]]:
    """(what, start, stop) in characters for every answer that its text determines.

    This leaves out small talk, and the first question about a text: only its answer shows whether the answers are short
    or full sentences.
    """
    found = [("JSON", match.start(1), match.end(1)) for match in re.finditer(r'\n(\{".*\})', text)]
    if kind == "qa":
        lines = list(re.finditer(r"\nAnswer: (.*)", text))[1:]
        found += [("questions", match.start(1), match.end(1)) for match in lines]
    return found


def _share(flags: Tensor) -> float:
    return float(flags.float().mean())


def _runs(same: Tensor, most: int) -> Tensor:
    """For every position with `most` successors: how many of the next choices are equal in a row."""
    if same.numel() < most:
        return torch.empty(0, dtype=torch.long)
    return same.unfold(0, most, 1).long().cumprod(-1).sum(-1)


@torch.no_grad()
def difference_from_transformers(folder: Path, ids: Sequence[int]) -> float:
    """Largest logit difference between transformers and the training code, both in float32."""
    tokens = torch.tensor([list(ids)])
    return float((peer(folder)(tokens).logits - load_exported(folder)(tokens)).abs().max())


@torch.no_grad()
def rounding_cost(trained: Transformer, folder: Path, ids: Sequence[int]) -> tuple[float, float]:
    """The error from bfloat16: the largest change of a logit, and the change of the mean loss in nats."""
    tokens = torch.tensor([list(ids)])
    before, after = trained(tokens)[0], load_exported(folder)(tokens)[0]
    targets = tokens[0, 1:]
    change = F.cross_entropy(after[:-1], targets) - F.cross_entropy(before[:-1], targets)
    return float((after - before).abs().max()), float(change)


def generate(
    folder: Path, ids: Sequence[int], eos: Sequence[int], temperature: float, top_p: float, seed: int, most: int
) -> list[int]:
    """New tokens sampled by transformers: an independent check of the exported folder, with a KV cache."""
    model = peer(folder)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    tokens = torch.tensor([list(ids)])
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=min(most, model.config.max_position_embeddings - len(ids)),
        eos_token_id=list(eos),
        pad_token_id=eos[0],
        **(sampling if temperature > 0 else {"do_sample": False, "temperature": None, "top_p": None}),
    )
    new: list[int] = out[0, len(ids) :].tolist()
    return new


@functools.cache
def peer(folder: Path) -> Any:
    """The exported model in transformers, float32."""
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
