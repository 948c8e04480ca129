"""The gain from error feedback (GPTQ) on the model's own text: errors of outputs, KL divergence, perplexity, time.

    python -m benchmarks.calibration [--large | --only-large]

Errors of outputs are relative RMS errors over inputs of four kinds, for random matrices rounded to nearest and with
feedback. KL divergence (in thousandths of a nat per token) and perplexity are those of the demo model on
training/heldout.txt, which it wasn't trained on; it is calibrated on texts that it writes itself. --large also
quantizes random weights in the shape of Qwen3-0.6B. The last line is one JSON object.
"""

import argparse
import json
import math
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from benchmarks.checkpoints import random_checkpoint
from benchmarks.machine import description
from benchmarks.quantization import END_OF_TEXT, HELDOUT
from onward.language_model import Calibration, quantize, quantize_folder
from onward.quantization import quantize_weight, quantize_with_feedback, relative_output_error

FORMATS = ("int8", "int4", "iq4_nl")
ROWS, INPUTS, TOKENS = 512, 1024, 4096


def weights() -> dict[str, Tensor]:
    """Kind -> float32 [ROWS, INPUTS]."""
    torch.manual_seed(0)
    normal = torch.randn(ROWS, INPUTS)
    return {
        "normal": normal,
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((ROWS, INPUTS)),
        "Student t, 4": torch.distributions.StudentT(4.0).sample((ROWS, INPUTS)),
        "outliers, 0.2 % of 20": normal * torch.where(torch.rand(ROWS, INPUTS) < 0.002, 20.0, 1.0),
        "columns of scale e^normal": normal * torch.randn(INPUTS).exp(),
    }


def inputs() -> dict[str, Tensor]:
    """Kind -> float32 [TOKENS, INPUTS]."""
    torch.manual_seed(1)
    noise = torch.randn(TOKENS, INPUTS)
    outliers = noise.clone()
    outliers[:, ::61] *= 20
    return {
        "independent": noise,
        "mixed": 0.3 * noise + torch.randn(TOKENS, INPUTS) @ torch.randn(INPUTS, INPUTS) / INPUTS**0.5,
        "near 128 directions": 0.3 * noise + torch.randn(TOKENS, 128) @ torch.randn(128, INPUTS) / 128**0.5,
        "outlier columns": outliers,
    }


def errors_by_matrix() -> dict[str, dict[str, dict[str, float]]]:
    columns = [f"{format} {rule}" for format in FORMATS for rule in ("nearest", "fed")]
    print(f"{'relative RMS error of outputs, %':50}" + "".join(f"{name:>16}" for name in columns))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for kind, weight in weights().items():
        for of_inputs, x in inputs().items():
            row = {}
            for format in FORMATS:
                nearest = relative_output_error(weight, quantize_weight(weight, format), x.T @ x)
                fed = quantize_with_feedback(weight, x.T @ x, format).relative_output_error
                row |= {f"{format} nearest": round(nearest, 6), f"{format} fed": round(fed, 6)}
            print(f"{f'{kind}; inputs {of_inputs}':50}" + "".join(f"{row[name] * 100:>16.3f}" for name in columns))
            table.setdefault(kind, {})[of_inputs] = row
    return table


class Measure:
    """KL divergence from the model in bf16, and perplexity, over the held-out documents."""

    def __init__(self, lm: onward.LanguageModel) -> None:
        texts = [text for text in HELDOUT.read_text(encoding="utf-8").split(f"{END_OF_TEXT}\n") if text]
        longest = (lm.model.max_seq_len or 2**20) + 1
        self._documents = [lm.encode(text + END_OF_TEXT)[:longest] for text in texts]
        self._base = [F.log_softmax(lm.logits(ids[:-1]).float(), -1) for ids in self._documents]

    def __call__(self, name: str, lm: onward.LanguageModel) -> dict[str, float]:
        divergence = nats = 0.0
        for ids, base in zip(self._documents, self._base, strict=True):
            logprobs = F.log_softmax(lm.logits(ids[:-1]).float(), -1)
            divergence += float(F.kl_div(logprobs, base, reduction="sum", log_target=True))
            nats += float(F.nll_loss(logprobs, torch.tensor(ids[1:]), reduction="sum"))
        tokens = sum(len(ids) - 1 for ids in self._documents)
        result = {"kl": round(divergence / tokens, 7), "perplexity": round(math.exp(nats / tokens), 6)}
        print(f"{name:16} KL {1000 * result['kl']:7.4f}  perplexity {result['perplexity']:.5f}", flush=True)
        return result


def quality() -> dict[str, Any]:
    lm = onward.load("demo", dtype="bfloat16")
    measure = Measure(lm)
    result = {"bf16": measure("bf16", lm)}
    for format in FORMATS:
        began = time.perf_counter()
        fed = quantize(lm, format, calibrate=Calibration())
        seconds = round(time.perf_counter() - began, 1)
        result[format] = measure(f"{format} nearest", quantize(lm, format))
        result[f"{format} fed"] = measure(f"{format} fed", fed) | {"seconds": seconds}
    return result


def large() -> dict[str, dict[str, float]]:
    """Seconds, and the most memory in GB so far, to quantize the shape of Qwen3-0.6B into a folder; texts are given."""
    source, usual, result = random_checkpoint(), Calibration(), {}
    ids = torch.randint(0, 150_000, (usual.texts, usual.length))
    for format in ("int4", "iq4_nl"):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as temporary:
            quantize_folder(source, Path(temporary) / format, format, calibrate=Calibration(ids=ids))
        seconds = round(time.perf_counter() - began, 1)
        memory = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(f"{format}: 0.6 B weights for {ids.numel():,} tokens: {seconds} s, at most {memory} GB", flush=True)
        result[format] = {"seconds": seconds, "gigabytes": memory}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-large", action="store_true", help="measure nothing else")
    parser.add_argument("--large", action="store_true", help="also quantize 0.6 B weights")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": description()}
    if not arguments.only_large:
        result |= {"output_errors": errors_by_matrix(), "demo": quality()}
    if arguments.large or arguments.only_large:
        result["large"] = large()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
