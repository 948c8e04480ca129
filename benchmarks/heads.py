"""Draft heads in the shape of Qwen3-0.6B: the cost of a round, compared with plain decoding.

    python -m benchmarks.heads [--precision int8] [--rounds N] [--threads N] [--cpu-time]

Random weights, made in memory: an EAGLE-3 head with 32,000 ids that reads three layers, and an MTP layer like the
model's last layer, with the model's lm_head. All contestants alternate in every round, with the same weights, in one
process: the model without a head; with cached taps that nothing reads ("taps alone"); with drafts of a fixed length;
and with drafts of adaptive length. Random heads guess almost nothing right. The cost of a round divided by that of a
plain token is the number of tokens that a round must yield to be faster; the adaptive contestant shows the cost of a
useless head. Figures are medians of each round's ratios; the last line is one JSON object. --cpu-time measures the
processor time of the process, for a busy machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import onward
from benchmarks.checkpoints import QWEN3_0_6B
from benchmarks.drawn import _Noise, random_model
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.decoding.speculation import HeadDrafter, Speculator
from onward.models import Model, WeightScope, architecture_of, build_model, pack_layer
from onward.models.blocks import Decoder
from onward.models.blocks.decoder import MtpNames
from onward.models.heads import DraftHead, MtpHead
from onward.models.heads.eagle3 import read_eagle3
from onward.quantization import quantize_params

PROMPT, NEW_TOKENS, LENGTHS = 64, 40, (1, 4)
_OF_THE_MODEL = ("architectures", "model_type", "num_hidden_layers", "tie_word_embeddings")
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
    **{name: value for name, value in QWEN3_0_6B.items() if name not in _OF_THE_MODEL},
}


def with_head(model: Model, head: DraftHead, precision: str) -> onward.LanguageModel:
    """The model with cached taps for a head, which drafts for it."""
    scope = WeightScope(_Noise())
    table = {"d2t": torch.arange(32_000) * 3}
    params = head.read(scope, table.get)
    params = pack_layer(params) if precision == "bf16" else quantize_params(params, precision)[0]
    decoder = architecture_of(model)
    assert isinstance(decoder, Decoder)
    lm = onward.LanguageModel(build_model(replace(decoder, cached_taps=head.taps), model.params), prefix_memory=0)
    lm.draft = HeadDrafter(head, params)
    return lm


def step_ms(
    lm: onward.LanguageModel, prompt: list[int], draft: Speculator | None, clock: Callable[[], float]
) -> tuple[float, float]:
    """Milliseconds of a token after the first, and of a round, or of a token without rounds."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    times = []
    for count in (1, NEW_TOKENS):
        began = clock()
        done = lm.generate(prompt, draft=draft, max_new_tokens=count, **options)
        times.append(clock() - began)
    assert isinstance(done, onward.Completion)
    milliseconds = 1e3 * (times[1] - times[0]) / (NEW_TOKENS - 1)
    counts = done.speculation
    return milliseconds, milliseconds * (counts.tokens_per_round if counts is not None and counts.rounds else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    onward.set_num_threads(arguments.threads)
    buffer = bandwidth_buffer()
    bandwidth = [read_bandwidth(buffer)]
    model = random_model(arguments.precision, QWEN3_0_6B)
    decoder = architecture_of(model)
    assert isinstance(decoder, Decoder)
    heads = {
        "EAGLE-3": read_eagle3(EAGLE3, decoder),
        "MTP": MtpHead(decoder, ("norm",), decoder.layers[-1], MtpNames("mtp")),
    }
    contestants: dict[str, tuple[onward.LanguageModel, Speculator | None]] = {
        "plain": (onward.LanguageModel(model, prefix_memory=0), None)
    }
    for name, head in heads.items():
        lm = with_head(model, head, arguments.precision)
        assert lm.draft is not None
        drafter = lm.draft.drafter
        contestants[f"{name}, taps alone"] = lm, None
        contestants |= {f"{name}, drafts of {n}": (lm, Speculator(drafter, length=n)) for n in LENGTHS}
        contestants[f"{name}, adaptive"] = lm, lm.draft
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    draws = torch.Generator().manual_seed(1)
    for turn in range(arguments.rounds + 1):
        prompt = torch.randint(0, QWEN3_0_6B["vocab_size"], (PROMPT,), generator=draws).tolist()
        for name, (lm, draft) in contestants.items():
            taken = step_ms(lm, prompt, draft, clock)
            if turn:  # the first round creates programs
                times[name].append(taken)
    bandwidth.append(read_bandwidth(buffer))
    result: dict[str, Any] = {"machine": description(), "precision": arguments.precision}
    print(f"{'':24}{'ms a token':>12}{'of plain':>10}{'round of plain':>16}")
    for name, own in times.items():
        pairs = list(zip(own, times["plain"], strict=True))
        token, round_ = (statistics.median(one[at] / plain[0] for one, plain in pairs) for at in (0, 1))
        milliseconds = statistics.median(one[0] for one in own)
        result[name] = {"ms": round(milliseconds, 3), "ratio": round(token, 3), "round": round(round_, 3)}
        print(f"{name:24}{milliseconds:>12.2f}{token:>10.3f}{round_:>16.3f}")
    result["read_bandwidth_gb_s"] = [round(read / 1e9, 1) for read in bandwidth]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
