"""A training step with Onward's forward, compared with plain torch and the same parameters.

    python -m benchmarks.training [--shapes demo small] [--dtypes float32 bfloat16] [--pairs N] [--threads N]

A step is a forward to logprobs and a backward; the optimizer's step and the repacking after it are measured separately.
The plain model is written with F.linear, F.rms_norm and F.scaled_dot_product_attention, with the same float32
parameters, which it casts to the dtype of the model. "padded" is 8 texts of 256 ids; "packed" is 16 concatenated texts
of 32 to 256 ids. The two alternate. Figures are CPU seconds of this process; a ratio is the median of the pairs'
ratios. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from benchmarks.machine import description
from onward.models import architecture_of
from onward.testing import random_checkpoint

SMALL: Any = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
TEXTS = {"padded": [256] * 8, "packed": [32 + 15 * index for index in range(16)]}


class PlainQwen3:
    """Qwen3 in plain torch, over the parameters of a language model."""

    def __init__(self, lm: onward.LanguageModel) -> None:
        config: Any = architecture_of(lm.model)
        self.parameters = dict(lm.named_parameters())
        self.dtype = lm.model.params.embed_tokens.weight.dtype
        self.layers, self.attention = len(config.layers), config.layers[0].mixer

    def logprobs(self, texts: Sequence[list[int]]) -> list[Tensor]:
        lengths = [len(ids) - 1 for ids in texts]
        weights = {name: weight.to(self.dtype) for name, weight in self.parameters.items()}
        is_padded = len(set(lengths)) == 1
        shape = (len(texts), lengths[0]) if is_padded else (1, sum(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths]).view(shape)
        tokens = torch.tensor([token for ids in texts for token in ids[:-1]]).view(shape)
        embedding = weights["model.embed_tokens.weight"]
        x, angles = F.embedding(tokens, embedding), self._angles(positions)
        for layer in range(self.layers):
            own = _Below(weights, f"model.layers.{layer}.")
            normed = F.rms_norm(x, x.shape[-1:], own["input_layernorm.weight"], 1e-6)
            x = x + self._attend(own, normed, angles, None if is_padded else lengths)
            normed = F.rms_norm(x, x.shape[-1:], own["post_attention_layernorm.weight"], 1e-6)
            gated = F.silu(F.linear(normed, own["mlp.gate_proj.weight"])) * F.linear(normed, own["mlp.up_proj.weight"])
            x = x + F.linear(gated, own["mlp.down_proj.weight"])
        x = F.rms_norm(x, x.shape[-1:], weights["model.norm.weight"], 1e-6)
        logits = F.linear(x, weights.get("lm_head.weight", embedding)).flatten(0, 1)
        targets = torch.tensor([token for ids in texts for token in ids[1:]])
        chosen = -F.cross_entropy(logits.to(torch.float32), targets, reduction="none")
        return list(chosen.split(lengths))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dims, base = self.attention.rope.dims, self.attention.rope.base
        inverse = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        radians = (positions.unsqueeze(-1) * inverse).unsqueeze(1)
        both = torch.cat((radians, radians), -1)
        return both.cos().to(self.dtype), both.sin().to(self.dtype)

    def _attend(self, own: "_Below", x: Tensor, angles: tuple[Tensor, Tensor], lengths: list[int] | None) -> Tensor:
        width = self.attention.head_dim
        q, k, v = (
            F.linear(x, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, width)).transpose(1, 2)
            for name in "qkv"
        )
        q, k = (
            _turned(F.rms_norm(part, (width,), own[f"self_attn.{name}_norm.weight"], 1e-6), *angles)
            for name, part in (("q", q), ("k", k))
        )
        if lengths is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            parts = zip(*(part.split(lengths, 2) for part in (q, k, v)), strict=True)
            texts = [F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True) for own in parts]
            mixed = torch.cat(texts, 2)
        return F.linear(mixed.transpose(1, 2).flatten(2), own["self_attn.o_proj.weight"])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _Below:
    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(lm: onward.LanguageModel, kind: str, pairs: int) -> dict[str, float]:
    draws = torch.Generator().manual_seed(0)
    vocab = lm.model.vocab_size
    texts = [torch.randint(0, vocab, (length + 1,), generator=draws).tolist() for length in TEXTS[kind]]
    weights = torch.randn(sum(TEXTS[kind]), generator=draws)
    plain = PlainQwen3(lm)
    parameters = list(lm.parameters())
    times: dict[str, list[float]] = {name: [] for name in ("forward", "plain_forward", "step", "plain_step")}

    def run(logprobs: Callable[..., list[Tensor]], name: str) -> None:
        began = time.process_time()
        loss = (torch.cat(logprobs(texts)) * weights).sum()
        between = time.process_time()
        loss.backward()
        ended = time.process_time()
        times[f"{name}forward"].append(between - began)
        times[f"{name}step"].append(ended - began)
        for parameter in parameters:
            parameter.grad = None

    for pair in range(pairs + 1):
        order: list[tuple[Any, str]] = [(lm.logprobs, ""), (plain.logprobs, "plain_")]
        for logprobs, name in order if pair % 2 else order[::-1]:
            run(logprobs, name)
    times = {name: found[1:] for name, found in times.items()}  # the first pair warms up
    result = {f"{name}_s": statistics.median(found) for name, found in times.items()}
    for part in ("forward", "step"):
        ratios = [a / b for a, b in zip(times[part], times[f"plain_{part}"], strict=True)]
        result[f"{part}_ratio"] = statistics.median(ratios)
    return result


def repacking(lm: onward.LanguageModel, rounds: int) -> dict[str, float]:
    """Seconds of an AdamW step with small gradients, and of the repacking after it."""
    parameters = list(lm.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    steps, packs = [], []
    for _ in range(rounds):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        steps.append(seconds(optimizer.step))
        packs.append(seconds(lm.model.refresh))
        optimizer.zero_grad()
    return {"optimizer_s": statistics.median(steps[1:]), "repacking_s": statistics.median(packs[1:])}


def loaded(shape: str, dtype: str) -> onward.LanguageModel:
    if shape == "demo":
        return onward.load("demo", dtype=dtype, trainable=True)
    with tempfile.TemporaryDirectory() as folder:
        return onward.load(random_checkpoint(folder, "qwen3", **SMALL), dtype=dtype, trainable=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["demo", "small"], choices=("demo", "small"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    onward.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": description()}
    for shape in options.shapes:
        for dtype in options.dtypes:
            lm = loaded(shape, dtype)
            packing = repacking(lm, 5)
            for kind in TEXTS:
                found = measure(lm, kind, options.pairs)
                packed = packing["repacking_s"] / found["step_s"]
                print(
                    f"{shape:6} {dtype:9} {kind}: forward {found['forward_s']:.3f} s, {found['forward_ratio']:.2f}x of "
                    f"torch; step {found['step_s']:.3f} s, {found['step_ratio']:.2f}x; repacking {packed:.2%} of it",
                    flush=True,
                )
                report[f"{shape} {dtype} {kind}"] = found | packing
    print(json.dumps(report))


if __name__ == "__main__":
    main()
