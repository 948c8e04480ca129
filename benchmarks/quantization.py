"""The cost of 8 and 4 bits: weight errors compared with plain absmax and llama.cpp, perplexity, agreement, time.

    python -m benchmarks.quantization [--large] [--speed | --only-speed]

Errors are relative RMS errors of a matrix, for random matrices and those of the demo model, by kind. llama.cpp's
numbers come from its own quantizer, the package `gguf` (pip install -e '.[bench]'). Perplexity is that of the demo
model on training/heldout.txt; agreement is the share of 1,000 greedy tokens of the bf16 model that the quantized model
also chooses after the same tokens. --large also quantizes random weights in the shape of Qwen3-0.6B into a folder and
loads it; --speed measures their decoding and prefill, the formats in turns, with the read bandwidth of the machine
between them. The last line is one JSON object.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from benchmarks.checkpoints import QWEN3_0_6B, random_checkpoint, weight_bytes_per_token
from benchmarks.decode import NEW_TOKENS, PROMPTS, measure, onward_contestant
from benchmarks.machine import description
from onward.checkpoint import find_folder, read_weights
from onward.checkpoint.checkpoint import CheckpointFolder
from onward.language_model import quantize, quantize_folder
from onward.models import Linear, read_config
from onward.quantization import quantize_weight

HELDOUT = Path(__file__).parent.parent / "training" / "heldout.txt"
END_OF_TEXT = "<|endoftext|>"
AGREEMENT_TOKENS = 1000
SPEED_ROUNDS = 15
LIMITS = {"int8": 0.005, "int4": 0.04, "iq4_nl": 0.03}  # of perplexity, relative to bf16

Rounded = Callable[[Tensor], Tensor]


def absmax(bits: int, group: int | None) -> Rounded:
    """The plain rule: a float16 scale absmax / (2^(bits-1) - 1) for each row or group."""

    def rounded(weight: Tensor) -> Tensor:
        parts = weight.unflatten(1, (-1, group or weight.shape[1]))
        most = 2 ** (bits - 1) - 1
        scale = (parts.abs().amax(-1, keepdim=True) / most).to(torch.float16).to(torch.float32)
        return ((parts / scale).nan_to_num_(0.0).round_().clamp_(-most - 1, most) * scale).flatten(1)

    return rounded


def llama_cpp(name: str) -> Rounded:
    """Through llama.cpp's format `name` and back."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]

    def rounded(weight: Tensor) -> Tensor:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))

    return rounded


def rules() -> dict[str, Rounded]:
    return {
        "int8": lambda weight: quantize_weight(weight, "int8").dequantize(),
        "Q8_0": llama_cpp("Q8_0"),
        "iq4_nl": lambda weight: quantize_weight(weight, "iq4_nl").dequantize(),
        "int4": lambda weight: quantize_weight(weight, "int4").dequantize(),
        "absmax4": absmax(4, 32),
        "Q4_0": llama_cpp("Q4_0"),
    }


def matrices() -> dict[str, list[Tensor]]:
    """Kind -> float32 matrices."""
    torch.manual_seed(0)
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    kinds["random normal"].append(torch.randn(1024, 1024))
    kinds["random Laplace"].append(torch.distributions.Laplace(0.0, 1.0).sample((1024, 1024)))
    kinds["random Student t, 4"].append(torch.distributions.StudentT(4.0).sample((1024, 1024)))
    folder = find_folder("demo")
    params = read_weights(
        folder, read_config(CheckpointFolder(folder).config), dtype=torch.float32, device=torch.device("cpu")
    )
    kinds["demo embedding, head"].append(params.embed_tokens.weight)
    for layer in params.layers:
        for block in (layer.mixer, layer.feed_forward):
            for name, part in block._asdict().items():
                if isinstance(part, Linear):
                    kinds[f"demo {name}"].append(part.weight)
    return kinds


def relative_rms(weights: list[Tensor], rounded: Rounded) -> float:
    error = sum(float((weight - rounded(weight)).square().sum(dtype=torch.float64)) for weight in weights)
    return math.sqrt(error / sum(float(weight.square().sum(dtype=torch.float64)) for weight in weights))


def weight_errors() -> dict[str, dict[str, float]]:
    ours_and_theirs = rules()
    print(f"{'relative RMS error, %':24}" + "".join(f"{name:>10}" for name in ours_and_theirs) + f"{'int4/Q4_0':>12}")
    table = {}
    for kind, weights in matrices().items():
        row = {name: relative_rms(weights, rule) for name, rule in ours_and_theirs.items()}
        ratio = row["int4"] / row["Q4_0"]
        print(f"{kind:24}" + "".join(f"{value:>10.3%}"[:-1] + " " for value in row.values()) + f"{ratio:>11.3f}")
        table[kind] = {name: round(value, 6) for name, value in row.items()} | {"int4_over_q4_0": round(ratio, 4)}
    return table


def perplexity(lm: onward.LanguageModel, documents: list[list[int]]) -> float:
    """The perplexity of all documents, without the first token of each, up to the context's length."""
    nats, tokens = 0.0, 0
    for document in documents:
        ids = document[: (lm.model.max_seq_len or len(document)) + 1]
        nats += float(F.cross_entropy(lm.logits(ids[:-1]), torch.tensor(ids[1:]), reduction="sum"))
        tokens += len(ids) - 1
    return math.exp(nats / tokens)


def greedy_texts(lm: onward.LanguageModel, documents: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """(prompt, the bf16 model's own continuation): together AGREEMENT_TOKENS of them."""
    texts, left = [], AGREEMENT_TOKENS
    for document in documents:
        prompt = document[:16]
        completion = lm.generate(prompt, max_new_tokens=min(left, 100), temperature=0.0)
        assert isinstance(completion, onward.Completion)
        texts.append((prompt, completion.token_ids))
        left -= len(completion.token_ids)
        if left == 0:
            break
    return texts


def agreement(lm: onward.LanguageModel, texts: list[tuple[list[int], list[int]]]) -> float:
    """The share of tokens that the model also chooses after the same tokens."""
    same = 0
    for prompt, chosen in texts:
        choices = lm.logits([*prompt, *chosen][:-1])[len(prompt) - 1 :].argmax(-1)
        same += int((choices == torch.tensor(chosen)).sum())
    return same / sum(len(chosen) for _, chosen in texts)


def quality() -> dict[str, Any]:
    """Perplexity and agreement of the demo model in each format, compared with bf16."""
    lm = onward.load("demo", dtype="bfloat16")
    texts = [text for text in HELDOUT.read_text(encoding="utf-8").split(f"{END_OF_TEXT}\n") if text]
    documents = [lm.encode(text + END_OF_TEXT) for text in texts]
    base = perplexity(lm, documents)
    greedy = greedy_texts(lm, documents)
    print(f"\n{len(documents)} held-out documents, {sum(map(len, documents)):,} tokens")
    print(f"bf16  perplexity {base:.5f}; agrees with itself, in one pass, on {agreement(lm, greedy):.1%}")
    result: dict[str, Any] = {"bf16": {"perplexity": round(base, 6), "agreement": agreement(lm, greedy)}}
    for format, limit in LIMITS.items():
        small = quantize(lm, format)
        value, same = perplexity(small, documents), agreement(small, greedy)
        change = value / base - 1
        verdict = "within" if change <= limit else "OVER"
        print(f"{format}  perplexity {value:.5f} ({change:+.2%}, {verdict} {limit:.1%}); agrees on {same:.1%}")
        result[format] = {"perplexity": round(value, 6), "change": round(change, 6), "agreement": round(same, 4)}
    return result


def quantizing_speed() -> dict[str, float]:
    """Seconds for 0.6 B weights, from a matrix of 12 M; the median of three."""
    weight = torch.randn(4096, 3072).to(torch.bfloat16)
    result = {}
    for format in LIMITS:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            quantize_weight(weight, format)
            seconds.append(time.perf_counter() - began)
        result[format] = round(statistics.median(seconds) * 0.6e9 / weight.numel(), 1)
    print(f"\nseconds for 0.6 B weights: {', '.join(f'{name} {value}' for name, value in result.items())}")
    return result


def large_folder() -> dict[str, Any]:
    """Quantize Qwen3-0.6B's shape into a folder, and load it: a warm page cache, a fresh process, median of three.

    Importing torch is not part of loading: `onward.load` is looked up before the clock starts.
    """
    source, result = random_checkpoint(), {}
    code = "import time; from onward import load; t = time.perf_counter(); load({0!r}); print(time.perf_counter() - t)"
    for format in LIMITS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / format
            began = time.perf_counter()
            quantize_folder(source, folder, format)
            write_seconds = time.perf_counter() - began
            size = (folder / "model.safetensors").stat().st_size
            command = [sys.executable, "-c", code.format(str(folder))]
            runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
        loaded = statistics.median(float(run.stdout) for run in runs)
        print(
            f"{format} folder of 0.6 B: {size / 1e6:.0f} MB, written in {write_seconds:.1f} s, loaded in {loaded:.3f} s"
        )
        result[format] = {
            "bytes": size,
            "seconds_to_write": round(write_seconds, 1),
            "seconds_to_load": round(loaded, 3),
        }
    return result


def turns(seconds: list[float]) -> list[list[float]]:
    """Seconds of tokens, turn by turn."""
    own = NEW_TOKENS - 1  # the first comes with the prompt
    return [seconds[at : at + own] for at in range(0, len(seconds), own)]


def decoding_speed() -> dict[str, Any]:
    """Tokens a second of Qwen3-0.6B's shape in each format, decoded and of a prompt; what share of the bus that is, and
    how it compares with int4 in the same turn: the bus changes from turn to turn."""
    source, shape = random_checkpoint(), QWEN3_0_6B
    contestants = {format: onward_contestant(onward.load(source, quantize=format)) for format in LIMITS}
    samples, bandwidth = measure(contestants, SPEED_ROUNDS, shape["vocab_size"])
    limit, result = statistics.median(bandwidth), {}
    print(f"\nread bandwidth {limit / 1e9:.1f} GB/s; tokens a second")
    for format, taken in samples.items():
        row = {f"decode after {n}": 1 / statistics.median(taken.token[n]) for n in PROMPTS}
        row |= {f"prompt of {n}": n / statistics.median(taken.prefill[n]) for n in PROMPTS}
        for n in PROMPTS:
            ratios = (
                statistics.median(theirs) / statistics.median(ours)
                for theirs, ours in zip(turns(samples["int4"].token[n]), turns(taken.token[n]), strict=True)
            )
            row[f"over int4 after {n}"] = statistics.median(ratios)
        row["of limit"] = row[f"decode after {PROMPTS[0]}"] * weight_bytes_per_token(shape, format) / limit
        print(f"{format:7}" + "  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
        result[format] = {name: round(value, 3) for name, value in row.items()}
    return result | {"read_bandwidth_gb_s": round(limit / 1e9, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also quantize and load 0.6 B weights")
    parser.add_argument("--speed", action="store_true", help="also decode with them")
    parser.add_argument("--only-speed", action="store_true", help="nothing else")
    arguments = parser.parse_args()
    if arguments.only_speed:
        print(json.dumps({"machine": description(), "speed": decoding_speed()}))
        return
    result: dict[str, Any] = {"machine": description(), "relative_rms_error": weight_errors(), "demo": quality()}
    result["seconds_for_0.6_b"] = quantizing_speed()
    if arguments.large:
        result["folder"] = large_folder()
    if arguments.speed:
        result["speed"] = decoding_speed()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
