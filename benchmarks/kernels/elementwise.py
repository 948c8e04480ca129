"""Norms, rotary embedding, gated activations and argmax, compared with torch for the same definitions.

    python -m benchmarks.kernels.elementwise [--repeats 15] [--dtype bfloat16]

In the shape of Qwen3-0.6B (hidden 1024, intermediate 3072, 16 heads of 128, vocabulary 151,936), for 1 token and
for 512. Figures are microseconds per call, medians of alternating runs; the last line is JSON.
"""

import ctypes
import json
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.common import CODES, Run, begin_with_dtype, medians, repeated
from onward import native

HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 128, 151_936
CALLS = 50  # of a measured run: one call is shorter than the clock is fine
Pair = tuple[str, Run, Run]  # what, ours, torch's


def rms_norm_definition(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def layer_norm_definition(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x.float() - x.float().mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def rotate_definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def norms(library: native.Library, rows: int, dtype: torch.dtype) -> Iterator[Pair]:
    x, residual, out = (torch.randn(rows, HIDDEN).to(dtype) for _ in range(3))
    weight, bias = torch.ones(HIDDEN, dtype=dtype), torch.zeros(HIDDEN, dtype=dtype)
    place = (rows, HIDDEN, CODES[dtype], x.data_ptr(), HIDDEN)
    end = (1e-6, out.data_ptr(), HIDDEN)
    nothing_added = (None, 0, None, 0)
    plain = (*place, *nothing_added, weight.data_ptr(), 0.0, 1, *end)
    # A residual of zeros: x must not grow from call to call.
    residual.zero_()
    fused = (*place, residual.data_ptr(), HIDDEN, x.data_ptr(), HIDDEN, weight.data_ptr(), 0.0, 1, *end)
    yield "rms_norm", lambda: library.onward_rms_norm(*plain), lambda: rms_norm_definition(x, weight)
    yield (
        "add + rms_norm",
        lambda: library.onward_rms_norm(*fused),
        lambda: rms_norm_definition(x.add_(residual), weight),
    )
    layer = (*place, *nothing_added, weight.data_ptr(), bias.data_ptr(), *end)

    def run_layer_norm() -> int:
        status: int = library.onward_layer_norm(*layer)
        return status

    yield "layer_norm", run_layer_norm, lambda: layer_norm_definition(x, weight, bias)
    yield "layer_norm (torch: its kernel)", run_layer_norm, lambda: F.layer_norm(x, (HIDDEN,), weight, bias)


def rotary(library: native.Library, rows: int, dtype: torch.dtype) -> Iterator[Pair]:
    x = torch.randn(1, HEADS, rows, HEAD_DIM).to(dtype)
    out, pairs = torch.empty_like(x), HEAD_DIM // 2
    angle = torch.arange(rows)[:, None] * 1e6 ** -(torch.arange(pairs) / pairs)
    cos, sin = angle.cos()[None], angle.sin()[None]
    strides, angle_strides = (ctypes.c_int64 * 3)(*x.stride()[:3]), (ctypes.c_int64 * 2)(*cos.stride()[:2])
    place = (1, HEADS, rows, HEAD_DIM, CODES[dtype], x.data_ptr(), strides)
    arguments = (*place, cos.data_ptr(), sin.data_ptr(), pairs, angle_strides, 0, out.data_ptr(), strides)
    yield "rotate", lambda: library.onward_rotate(*arguments), lambda: rotate_definition(x, cos[:, None], sin[:, None])


def gates(library: native.Library, rows: int, dtype: torch.dtype) -> Iterator[Pair]:
    gate, up, out = (torch.randn(rows, INTERMEDIATE).to(dtype) for _ in range(3))
    size = (rows, INTERMEDIATE, CODES[dtype])
    place = (gate.data_ptr(), INTERMEDIATE, up.data_ptr(), INTERMEDIATE, out.data_ptr(), INTERMEDIATE)
    yield "swiglu", lambda: library.onward_swiglu(*size, *place), lambda: F.silu(gate) * up
    yield "geglu", lambda: library.onward_geglu(*size, 0, *place), lambda: F.gelu(gate) * up
    yield (
        "geglu, tanh",
        lambda: library.onward_geglu(*size, 1, *place),
        lambda: F.gelu(gate, approximate="tanh") * up,
    )


def picks(library: native.Library, rows: int, dtype: torch.dtype) -> Iterator[Pair]:
    rows = min(rows, 8)
    logits, out = torch.randn(rows, VOCABULARY), torch.empty(rows, dtype=torch.int64)
    place = (rows, VOCABULARY, logits.data_ptr(), CODES[torch.float32], VOCABULARY, out.data_ptr())
    yield f"argmax ({rows} rows)", lambda: library.onward_argmax(*place), lambda: logits.argmax(-1)


def main() -> None:
    library, dtype, options, result = begin_with_dtype(__doc__, repeats=15)
    for rows in (1, 512):
        for make in (norms, rotary, gates, picks):
            for what, ours, torchs in make(library, rows, dtype):
                runs = [repeated(run, CALLS) for run in (ours, torchs)]
                mine, other = (s / CALLS * 1e6 for s in medians(runs, options.repeats))
                print(f"T={rows:<4}{what:32} {mine:8.2f} | torch {other:8.2f} ({other / mine:.1f}x)", flush=True)
                result[f"{what} {rows}"] = {"us": mine, "torch_us": other, "x": other / mine}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
