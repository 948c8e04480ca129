"""A KV cache in 8 bits compared with one in the model's dtype: time per token after a long prompt, and divergence.

    python -m benchmarks.cache_format [--positions 4000] [--quantize int8] [--rounds 10] [--threads N]
    python -m benchmarks.cache_format --peers [--quantize int8] [--rounds 10]      (after make peers)
    python -m benchmarks.cache_format --divergence

Speed: random weights in the shape of Qwen3-0.6B, batch 1, greedy. Both models are in one process and alternate; the
order changes from round to round. The keys and values of the prompt are random rows instead of computed ones, so that
16,000 positions take seconds, not minutes. They come from the prefix cache, so that only tokens are timed.

Peers: llama.cpp with a cache in Q8_0 and OpenVINO with one in u8, on the same weights after a prompt of 4,000 tokens,
in turns (benchmarks/README.md).

Divergence: the KL divergence of the next token, in nats, compared with a float cache. Models: the demo model on
held-out text, and a random Qwen2 model whose keys have large biases in two rotary pairs of each head and a large gain
in some features, with queries that are small there (as they must be in a trained model). Random weights bound the
error of the arithmetic only. The last line is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import onward
from benchmarks.checkpoints import random_checkpoint
from benchmarks.compare.contenders import OURS, NotAvailableError, with_8_bit_caches
from benchmarks.compare.measure import LONG, Course, Plan, contender_command
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.models import Model, architecture_of, build_model, named_params, pack_params
from onward.models.key_balance import balanced_keys
from onward.ops.kv_format import checked_cache_format
from onward.testing import tiny_model

NEW, SKIPPED = 24, 2  # tokens of a round, and the first ones, which are not timed
HEADS, GROUPS, DIM = 4, 2, 64
HELD_OUT = Path(__file__).parents[1] / "training" / "heldout.txt"


def speed(positions: int, quantize: str | None, rounds: int) -> dict[str, float]:
    """Milliseconds of a token with either cache, and the median of the ratios, round by round."""
    formats = (None, "int8")
    lms = [
        onward.load(random_checkpoint(), quantize=quantize, cache_format=format, max_seq_len=positions + 1024)
        for format in formats
    ]
    prompt = torch.randint(0, 150_000, (positions,), generator=torch.Generator().manual_seed(0)).tolist()
    for lm in lms:
        lm.model = with_random_prompts(lm.model)
        lm.prefix_memory = 2**32
        lm.generate(prompt, max_new_tokens=1, temperature=0)
    seconds: list[list[float]] = [[], []]
    buffer, bandwidth = bandwidth_buffer(), []
    for number in range(rounds):
        bandwidth.append(read_bandwidth(buffer) / 1e9)
        for at in (0, 1) if number % 2 else (1, 0):
            times = [time.perf_counter() for _ in lms[at].stream(prompt, max_new_tokens=NEW, temperature=0)]
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            seconds[at].append(statistics.median(gaps[SKIPPED:]))
    ratios = [float_cache / int8 for float_cache, int8 in zip(*seconds, strict=True)]
    floats, int8 = (1e3 * statistics.median(each) for each in seconds)
    result = {"float_ms": floats, "int8_ms": int8, "ratio": statistics.median(ratios), "low": min(ratios)}
    return result | {"read_GB_s": statistics.median(bandwidth)}


def with_random_prompts(model: Model) -> Model:
    """The model, except that a call with several tokens writes random keys and values, and returns logits of 0."""
    architecture = architecture_of(model)
    assert architecture is not None
    draws, shapes = torch.Generator().manual_seed(0), tuple(architecture.cached)
    rows = torch.randn(1, shapes[0].num_kv_heads, 2048, shapes[0].key_dim, generator=draws).bfloat16()

    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None) -> Any:
        (own, rows), count = params, tokens.shape[1]
        if count == 1:
            return model.forward(tokens, offsets, cache, own, logits_at=logits_at)
        new = rows[:, :, :count]
        for layer in range(len(shapes)):
            cache.attend(layer, new[:, :, :1], new, new, offsets)
        count_at = count if logits_at is None else logits_at.shape[1]
        return torch.zeros(1, count_at, model.vocab_size), cache

    return replace(model, forward=forward, params=(model.params, rows))


def compared_with_peers(precision: str, rounds: int) -> dict[str, float]:
    """Tokens a second of each after a prompt of 4,000, and the least that Onward leads by: the median over turns of the
    ratio within a turn."""
    plan = Plan(rounds=rounds, tokens=8, threads=torch.get_num_threads())
    course = Course(plan)
    try:
        for contender in with_8_bit_caches(precision):
            try:
                course.enter(contender.label, contender_command(contender, plan))
            except NotAvailableError as error:
                print(f"missing: {contender.label}: {error}")
        prompt = course.prompt(LONG)
        for name in course.everyone():
            course.begin(name, prompt)
            course.more(name, LONG, keep=False)
        for turn in range(rounds):
            for name in course.everyone(turn):
                course.more(name, LONG)
    finally:
        course.end()
    turns = {
        name: [statistics.median(turn) for turn in each.token[LONG]] for name, each in course.result.samples.items()
    }
    result = {name: 1 / statistics.median(each) for name, each in turns.items() if each}
    ours = next(each for name, each in turns.items() if name.startswith(OURS))
    peers = [each for name, each in turns.items() if not name.startswith(OURS) and each]
    if peers:
        result["lead"] = min(statistics.median(t / o for t, o in zip(each, ours, strict=False)) for each in peers)
    return result


def divergence(one: Model, other: Model, ids: list[int], chunk: int = 512) -> float:
    """The mean over all positions of the divergence of `other` from `one`."""
    parts, caches = [], [model.new_cache(1, len(ids) + 1) for model in (one, other)]
    for start in range(0, len(ids), chunk):
        tokens = torch.tensor([ids[start : start + chunk]], dtype=torch.int32)
        offsets, logprobs = torch.tensor([start], dtype=torch.int32), []
        for at, model in enumerate((one, other)):
            logits, caches[at] = model(tokens, offsets, caches[at])
            logprobs.append(logits.double().log_softmax(-1))
        parts.append((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(-1).flatten())
    return float(torch.cat(parts).mean())


def with_outliers(bias: float, gain: float) -> Model:
    """A random Qwen2 model of 6 layers. bias: of two of the slowest rotary pairs of each head. gain: of 3 % of the
    features of keys and values."""
    model = tiny_model(
        "qwen2", hidden_size=256, num_hidden_layers=6, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        head_dim=DIM, intermediate_size=512, vocab_size=512, max_position_embeddings=8192, rope_theta=1e6,
    )  # fmt: skip
    draws, layers = torch.Generator().manual_seed(1), {}
    names, tensors = (pytree.tree_leaves(tree) for tree in (named_params(architecture_of(model)), model.params))
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(name, str) or ".layers." not in name:
            continue
        layer = name.split(".layers.")[1].split(".")[0]
        if layer not in layers:
            biased = torch.zeros(GROUPS, DIM, dtype=torch.bool)
            for group in range(GROUPS):
                for pair in (24 + torch.randperm(8, generator=draws)[:2]).tolist():
                    biased[group, [pair, pair + 32]] = True
            layers[layer] = biased.flatten(), torch.rand(GROUPS * DIM, generator=draws) < 0.03
        biased, gained = layers[layer]
        if name.endswith("k_proj.bias"):
            drawn = torch.randn(tensor.shape, generator=draws)
            tensor.copy_(torch.where(biased, drawn.sign() * bias * (1 + drawn.abs() / 2), drawn))
        elif name.endswith("q_proj.bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=draws) * _small(biased, 2 / max(bias, 2)))
        elif name.endswith("q_proj.weight"):
            tensor.mul_((_small(biased, 2 / max(bias, 2)) * _small(gained, 1 / gain))[:, None])
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            tensor[gained] = tensor[gained] * gain
    return model


def _small(features: Tensor, factor: float) -> Tensor:
    """Factors of the queries of all heads: `factor` for these features of keys [G * E], else 1."""
    of_heads = features.view(GROUPS, 1, DIM).expand(GROUPS, HEADS // GROUPS, DIM).flatten()
    return torch.where(of_heads, factor, 1.0)


def divergences() -> dict[str, float]:
    int8, results = checked_cache_format("int8"), {}
    for dtype in ("float32", "bfloat16"):
        lm = onward.load("demo", dtype=dtype)
        in_8_bits = onward.load("demo", dtype=dtype, cache_format="int8")
        ids = list(lm.encode(HELD_OUT.read_text()[:6000]))[:1000]
        results[f"demo, {dtype}, 1,000 positions"] = divergence(lm.model, in_8_bits.model, ids)
    ids = torch.randint(0, 512, (8000,), generator=torch.Generator().manual_seed(2)).tolist()
    for bias, gain in ((2, 1), (20, 10), (100, 10), (200, 10)):
        model = with_outliers(bias, gain)
        architecture, params = architecture_of(model), pack_params(model.params)
        floats = build_model(architecture, params)
        for name, own in (("balanced", balanced_keys(architecture, params)), ("plain", params)):
            in_8_bits = build_model(architecture, own, cache_format=int8)
            results[f"random, bias {bias}, gain {gain}, {name}, 8,000"] = divergence(floats, in_8_bits, ids)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4000)
    parser.add_argument("--quantize", default="int8", help="int8, int4, iq4_nl or none")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--divergence", action="store_true")
    options = parser.parse_args()
    print(description())
    if options.threads is not None:
        onward.set_num_threads(options.threads)
        torch.set_num_threads(options.threads)
    if options.divergence:
        with torch.no_grad():
            result = divergences()
    elif options.peers:
        result = compared_with_peers("bf16" if options.quantize == "none" else options.quantize, options.rounds)
    else:
        quantize = None if options.quantize == "none" else options.quantize
        result = speed(options.positions, quantize, options.rounds)
    for name, value in result.items():
        print(f"{name:48} {value:.3g}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
