"""The gated delta rule in the shape of a Qwen3.5-9B layer: 16 key heads, 32 value heads, 128 x 128 each, 2 MB of state.

    python -m benchmarks.kernels.gated_delta [--repeats 9] [--dtype bfloat16]

Decoding: 16 tokens, a whole block, one after the other over the states of all 24 layers, which don't fit into a
processor cache. Figures are microseconds per token and layer, and the share of a plain read of the states in that time,
next to the same recurrence in torch, which reads and writes the state. Verification: 4, 8 and 16 tokens. Prefill: 512
tokens. The variants run in turns, and medians are printed; the last line is JSON.
"""

import json

import torch
from torch import Tensor

from benchmarks.kernels.common import Run, begin_with_dtype, medians
from onward import native, ops
from onward.cache.plan import lazy_zeros
from onward.ops.gated_delta import state_width
from onward.ops.recurrent_state import STATE_BLOCK

KEY_HEADS, HEADS, DIM, LAYERS = 16, 32, 128, 24
DRAFTS = (4, 8, 16)
PREFILL = 512
BEGINS = 4 * STATE_BLOCK  # the offset of the measured tokens


class Layer:
    """The states of a layer, those of one block after another, after some tokens."""

    def __init__(self, memory: Tensor, dtype: torch.dtype) -> None:
        self.state = memory.view(1, 2, HEADS, -1)
        self.block_numbers = torch.zeros(1, 2, dtype=torch.int32)
        self.A_log, self.bias = torch.full((HEADS,), -3.0), torch.zeros(HEADS)
        self(tokens(BEGINS, dtype), torch.zeros(1, dtype=torch.int32))

    def __call__(self, inputs: tuple[Tensor, Tensor, Tensor], offsets: Tensor) -> Tensor:
        return ops.gated_delta(
            *inputs, self.A_log, self.bias, self.state, self.block_numbers, offsets, key_heads=KEY_HEADS, key_dim=DIM
        )


def tokens(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(qkv, decay, beta) of one row."""
    widths = (2 * KEY_HEADS + HEADS) * DIM, HEADS, HEADS
    qkv, decay, beta = (torch.randn(1, count, width).to(dtype) for width in widths)
    return qkv, decay, beta


def new_layers(dtype: torch.dtype) -> list[Layer]:
    width = 2 * HEADS * state_width(DIM, DIM)
    memory = lazy_zeros((LAYERS, width), torch.float32, torch.device("cpu"), huge_pages=True)
    return [Layer(part, dtype) for part in memory]


def ours(layers: list[Layer], count: int, dtype: torch.dtype) -> Run:
    """A block's tokens, `count` at a time, through every layer."""
    inputs = tokens(count, dtype)
    at = [torch.tensor([BEGINS + first], dtype=torch.int32) for first in range(0, STATE_BLOCK, count)]

    def run() -> None:
        for offsets in at:
            for layer in layers:
                layer(inputs, offsets)

    return run


def torchs() -> Run:
    """One token through every layer by the recurrence in torch: the state is read, decayed, corrected and read."""
    states = [torch.zeros(HEADS, DIM, DIM) for _ in range(LAYERS)]
    q, k, v = torch.randn(3, HEADS, DIM, 1)
    k /= k.norm(dim=1, keepdim=True)
    decay, beta = torch.full((HEADS, 1, 1), 0.9), torch.full((HEADS, 1, 1), 0.5)

    def run() -> None:
        for state in states:
            state *= decay
            state.baddbmm_(k, (beta * (v - state.mT @ k)).mT)
            state.mT @ q

    return run


def read(library: native.Library, layers: list[Layer]) -> Run:
    """Reads as much memory as the states S take, once for each token of a block."""
    first, count = layers[0].state.data_ptr(), 4 * LAYERS * HEADS * DIM * DIM

    def run() -> None:
        for _ in range(STATE_BLOCK):
            library.onward_probe_read(first, count, -(-count // 1024 // 256) * 256)

    return run


def decode(library: native.Library, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    layers, calls = new_layers(dtype), STATE_BLOCK * LAYERS
    taken = medians([ours(layers, 1, dtype), read(library, layers), torchs()], repeats)
    one, plain, torch_one = taken[0] / calls, taken[1] / calls, taken[2] / LAYERS
    print(
        f"T=1, {LAYERS} layers: {one * 1e6:6.1f} us | a read of the state {plain * 1e6:6.1f} us ({plain / one:4.2f}) | "
        f"torch {torch_one * 1e6:7.1f} us ({torch_one / one:4.1f}x)",
        flush=True,
    )
    several = [seconds / calls for seconds in medians([ours(layers, count, dtype) for count in DRAFTS], repeats)]
    ratios = {f"ratio_{count}": count * taken / one for count, taken in zip(DRAFTS, several, strict=True)}
    print("verification: " + ", ".join(f"{name[6:]} tokens {ratio:.2f}x of one" for name, ratio in ratios.items()))
    return {"us": one * 1e6, "read_us": plain * 1e6, "of_read": plain / one, "x_torch": torch_one / one, **ratios}


def prefill(dtype: torch.dtype, repeats: int) -> dict[str, float]:
    layer, inputs = new_layers(dtype)[0], tokens(PREFILL, dtype)
    offsets = torch.zeros(1, dtype=torch.int32)
    (seconds,) = medians([lambda: layer(inputs, offsets)], repeats)
    # S^T k, S^T q and the end of a block: three products with S a token and head.
    rate = 6 * PREFILL * HEADS * DIM * DIM / seconds / 1e9
    print(f"T={PREFILL}: {seconds * 1e3:6.2f} ms, {seconds / PREFILL * 1e6:5.1f} us a token, {rate:5.0f} GFLOP/s")
    return {"ms": seconds * 1e3, "gflop_s": rate}


def main() -> None:
    library, dtype, options, result = begin_with_dtype(__doc__, repeats=9)
    result["decode"] = decode(library, dtype, options.repeats)
    result["prefill"] = prefill(dtype, options.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
