"""A model with experts: decoding beside the machine's read bandwidth, and the prefill of 512.

    python -m benchmarks.experts [--precisions bf16 int8 int4] [--rounds N]

Random weights, made in memory: 28 layers of hidden 1024 with the attention of Qwen3-0.6B and 64 experts of 384, of
which a token goes through 8. The bandwidth is measured between the prompts. The limit is the bandwidth over the bytes
that a token reads: of the experts those that it chose. Medians over all rounds. The last line is one JSON object.
"""

import argparse
import json
import statistics
from typing import Any

import torch
from torch import Tensor

import onward
from benchmarks.checkpoints import QWEN3_0_6B, cache_bytes_per_position
from benchmarks.decode import NEW_TOKENS, PROMPTS, measure, onward_contestant
from benchmarks.machine import description
from onward.models import (
    Embedding,
    ExpertLinear,
    Model,
    Scope,
    build_model,
    marked_parts,
    pack_layer,
    pack_params,
    read_config,
)
from onward.quantization import quantize_params

CONFIG = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


class _Noise:
    """Random weights, all cut from one pool: drawing billions would take a minute."""

    def __init__(self) -> None:
        self._pool = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
        self._at = 0

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if count > len(self._pool):
            return self._pool.repeat(count // len(self._pool) + 1)[:count].view(shape)
        self._at = (self._at + 7919) % (len(self._pool) - count + 1)
        return self._pool[self._at : self._at + count].view(shape)


def random_model(precision: str) -> Model:
    architecture = read_config(CONFIG)

    def convert(part: Any) -> Any:
        return part if precision == "bf16" else quantize_params(part, precision)[0]

    params = architecture.read(Scope(_Noise()), lambda layer: pack_layer(convert(layer)))
    rest = convert(params._replace(layers=()))
    return build_model(architecture, pack_params(rest)._replace(layers=params.layers))


def bytes_per_token(model: Model) -> int:
    """Bytes of weights that a token reads: all but the rows of the embedding and the experts that it did not choose."""
    share = CONFIG["num_experts_per_tok"] / CONFIG["num_experts"]
    total = 0.0
    for part in marked_parts(model.params):
        if not isinstance(part, Embedding):
            data = part.weight if isinstance(part.weight, Tensor) else part.weight.data
            total += data.nbytes * (share if isinstance(part, ExpertLinear) else 1)
    return round(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--explain", action="store_true", help="print where the time of a token goes")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": description()}
    for precision in arguments.precisions:
        model = random_model(precision)
        lm = onward.LanguageModel(model)
        samples, bandwidth = measure({"onward": onward_contestant(lm)}, arguments.rounds, model.vocab_size)
        limit, weights = statistics.median(bandwidth), bytes_per_token(model)
        row = result[precision] = {"read_bandwidth_gb_s": round(limit / 1e9, 1), "weight_bytes_per_token": weights}
        for length in PROMPTS:
            seconds = statistics.median(samples["onward"].token[length])
            read = weights + cache_bytes_per_position(CONFIG) * (length + NEW_TOKENS // 2)
            row[f"decode_after_{length}"] = round(1 / seconds, 2)
            row[f"share_of_limit_after_{length}"] = round(read / seconds / limit, 3)
            row[f"prefill_{length}"] = round(length / statistics.median(samples["onward"].prefill[length]), 1)
        print(precision, row, flush=True)
        if arguments.explain:
            print(lm.explain())
            print(lm.explain(tokens=512))
        del lm, model
    print(json.dumps(result))


if __name__ == "__main__":
    main()
