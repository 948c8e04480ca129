"""A whole token as a program: every kernel of a Qwen3-shaped decoder, run by one native call.

    python -m benchmarks.kernels.fused [--repeats 15] [--formats bf16,int8,int4] [--positions 32,512,4096]
        [--tokens 1] [--shape 0.6b|demo] [--against FOLDER] [--profile]

Milliseconds per token after a number of cached positions, and the rate at which the weights are read as a fraction of
that of a plain read of the same memory, measured in turns. `--against` runs the libraries of another build in the same
turns. `--profile` prints the time by kernel. The last line is JSON.
"""

import argparse
import ctypes
import json
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.common import Run, argument_parser, begin, medians, repeated
from benchmarks.kernels.linear import Weights, rounded
from onward import native
from onward.native.interface import SIGNATURES, DType, Format
from onward.ops.attention import AttentionArguments
from onward.ops.heads import HeadsArguments
from onward.ops.packed import LinearArguments

# A byte that makes finite weights and scales of a format, whatever part of it it lands in.
FILL = {Format.F32: 0x3C, Format.BF16: 0x3C, Format.F16: 0x24, Format.INT8: 0x3C, Format.INT4: 0x24}
BF16 = DType.BF16
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def matrices(self) -> list[tuple[int, int]]:
        """[outputs, inputs] of q, k, v, o, gate, up, down of every layer, then of the head."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = [
            *((rows, self.hidden) for rows in (queries, keys, keys)),
            (self.hidden, queries),
            *((self.intermediate, self.hidden),) * 2,
            (self.hidden, self.intermediate),
        ]
        return layer * self.layers + [(self.vocabulary, self.hidden)]


SHAPES = {
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151_936),
    "demo": Shape(6, 192, 4, 2, 64, 512, 2048),
}


class Code:
    """Instructions as words, and what must stay alive while they are run."""

    def __init__(self, library: native.Library) -> None:
        self.library, self.words, self.names = library, [], []
        self.alive: list[object] = []

    def add(self, name: str, *arguments: Any) -> None:
        self.words += [self.library.onward_program_instruction(name.encode()), len(arguments)]
        for argument, kind in zip(arguments, SIGNATURES[name][1], strict=True):
            self.words.append(self._word(argument, kind))
        self.names.append(name.removeprefix("onward_"))

    def _word(self, argument: Any, kind: Any) -> int:
        if argument is None:
            return 0
        if kind is ctypes.c_float:
            return struct.unpack("<i", struct.pack("<f", argument))[0]
        if isinstance(argument, Tensor):
            self.alive.append(argument)
            return argument.data_ptr()
        if isinstance(argument, (ctypes.Array, ctypes.Structure)):
            self.alive.append(argument)
            return ctypes.addressof(argument)
        return int(argument)

    def finish(self) -> None:
        self.code = torch.tensor(self.words, dtype=torch.int64)
        self.failed = torch.empty(1, dtype=torch.int64)
        self.nanoseconds = torch.zeros(len(self.names), dtype=torch.int64)

    def run(self, timed: bool = False) -> None:
        status = self.library.onward_program_run(
            self.code.data_ptr(), len(self.words), self.failed.data_ptr(),
            self.nanoseconds.data_ptr() if timed else None,
        )  # fmt: skip
        self.library.check(status, f"instruction at {self.failed.item()}")

    def microseconds(self, times: int) -> dict[str, float]:
        """By kernel, of one run."""
        self.nanoseconds.zero_()
        for _ in range(times):
            self.run(timed=True)
        total: dict[str, float] = defaultdict(float)
        for name, nanoseconds in zip(self.names, self.nanoseconds.tolist(), strict=True):
            total[name] += nanoseconds / times / 1e3
        return dict(total)


class Token:
    """The program of `tokens` new tokens after `positions` cached ones."""

    def __init__(self, library: native.Library, shape: Shape, weights: Weights, positions: int, tokens: int) -> None:
        self.shape, self.weights, self.tokens = shape, weights, tokens
        self.code = Code(library)
        self.offsets = torch.tensor([positions], dtype=torch.int32)
        self.capacity = -(-(positions + tokens) // 64) * 64
        self.x = self._buffer(shape.hidden)
        self._forward()
        self.code.finish()

    def _buffer(self, width: int) -> Tensor:
        return torch.zeros(self.tokens, width, dtype=torch.bfloat16)

    def _forward(self) -> None:
        shape, tokens = self.shape, self.tokens
        table = torch.randn(8, shape.hidden).bfloat16()
        ids = torch.arange(tokens, dtype=torch.int64) % 8
        self.code.add(
            "onward_gather_rows", tokens, shape.hidden, BF16, table, 8, shape.hidden, ids, 1, self.x, shape.hidden
        )
        self.norm = torch.ones(max(shape.hidden, shape.head_dim), dtype=torch.bfloat16)
        pairs = shape.head_dim // 2
        self.cos, self.sin = torch.rand(tokens, pairs), torch.rand(tokens, pairs)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        normed, mixed, residual = self._buffer(shape.hidden), self._buffer(queries), self._buffer(shape.hidden)
        q, k, v = self._buffer(queries), self._buffer(keys), self._buffer(keys)
        gate, up, gated = (self._buffer(shape.intermediate) for _ in range(3))
        for layer in range(shape.layers):
            first = 7 * layer
            self._rms_norm(residual if layer else None, normed)
            self._linear(first, normed, q, k, v)
            self._attend(q, k, v, mixed)
            self._linear(first + 3, mixed, residual)
            self._rms_norm(residual, normed)
            self._linear(first + 4, normed, gate, up)
            wide = shape.intermediate
            self.code.add("onward_swiglu", tokens, wide, BF16, gate, wide, up, wide, gated, wide)
            self._linear(first + 6, gated, residual)
        self._rms_norm(residual, normed)
        logits = self._buffer(shape.vocabulary)
        self._linear(7 * shape.layers, normed, logits)
        best = torch.empty(tokens, dtype=torch.int64)
        self.code.add("onward_argmax", tokens, shape.vocabulary, logits, BF16, shape.vocabulary, best)

    def _rms_norm(self, residual: Tensor | None, out: Tensor) -> None:
        width = self.shape.hidden
        self.code.add(
            "onward_rms_norm", self.tokens, width, BF16, self.x, width, residual, width, self.x, width,
            self.norm, 0.0, 1, EPS, out, width,
        )  # fmt: skip

    def _linear(self, first: int, x: Tensor, *outputs: Tensor) -> None:
        products = (LinearArguments * len(outputs))()
        for i, out in enumerate(outputs):
            rows = self.weights.shapes[first + i][0]
            products[i] = LinearArguments(rows, self.weights.addresses[first + i], None, out.data_ptr(), rows, 0, BF16)
        self.code.alive.extend(outputs)
        width = x.shape[1]
        self.code.add(
            "onward_linear_many", products, len(outputs), self.weights.format, self.tokens, width, x, BF16, width
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor) -> None:
        shape, tokens, dim = self.shape, self.tokens, self.shape.head_dim
        cached = (shape.kv_heads, self.capacity, dim)
        keys, values = (torch.randn(cached).bfloat16() for _ in range(2))
        cache_strides = (0, self.capacity * dim, dim)
        heads = (HeadsArguments * 3)()
        for i, (x, count, cache) in enumerate(
            ((q, shape.heads, None), (k, shape.kv_heads, keys), (v, shape.kv_heads, values))
        ):
            strides = (0, dim, count * dim)
            to = x if cache is None else cache
            heads[i] = HeadsArguments(
                heads=count, x=x.data_ptr(), x_strides=strides, norm_weight=None if x is v else self.norm.data_ptr(),
                eps=EPS, after_cast=1, rotate=x is not v, out=to.data_ptr(),
                out_strides=strides if cache is None else cache_strides, to_cache=cache is not None,
                positions=self.capacity,
            )  # fmt: skip
        pairs = dim // 2
        angle_strides = torch.tensor([tokens * pairs, pairs])
        self.code.add(
            "onward_heads", heads, 3, 1, tokens, dim, BF16, self.cos, self.sin, angle_strides, pairs, self.offsets
        )
        attention = AttentionArguments(
            batch=1, heads=shape.heads, kv_heads=shape.kv_heads, queries=tokens, positions=self.capacity,
            dim=dim, value_dim=dim,
            q=q.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), out=mixed.data_ptr(),
            q_strides=(0, dim, shape.heads * dim), keys_strides=cache_strides, values_strides=cache_strides,
            out_strides=(0, dim, shape.heads * dim), offsets=self.offsets.data_ptr(), scale=dim**-0.5, dtype=BF16,
        )  # fmt: skip
        self.code.alive += [q, k, v, keys, values, mixed]
        self.code.add("onward_attention", attention)


def new_weights(library: native.Library, fmt: Format, shape: Shape) -> Weights:
    weights = Weights(library, fmt, shape.matrices())
    weights.memory.fill_(FILL[fmt])
    return weights


def measure(libraries: list[native.Library], fmt: Format, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Every number of positions for every library, in turns with a plain read."""
    weights = new_weights(libraries[0], fmt, shape)
    times = max(1, int(5e8 / weights.bytes / 10))
    lengths = [int(text) for text in options.positions.split(",")]
    tokens = [Token(library, shape, weights, n, options.tokens) for n in lengths for library in libraries]
    reads: list[Run] = [repeated(weights.read(pieces), times) for pieces in (native.num_threads(), 1024)]
    (*read_s,) = medians([*reads, *(repeated(token.code.run, times) for token in tokens)], options.repeats)
    seconds = [s / times for s in read_s]
    limit, row = weights.bytes / min(seconds[:2]), {}
    print(f"{fmt.name.lower():>5}  read {limit / 1e9:5.1f} GB/s, {weights.bytes / 1e6:.1f} MB", flush=True)
    for i, s in enumerate(seconds[2:]):
        length, build = lengths[i // len(libraries)], i % len(libraries)
        fraction = weights.bytes / s / limit
        row[f"{length}.{build}"] = {"ms": s * 1e3, "fraction": fraction}
        print(f"       after {length:5} build {build}: {s * 1e3:8.4f} ms, {1 / s:8.1f}/s, {fraction:.3f} of the read")
    if options.profile:
        for i, token in enumerate(tokens):
            parts = sorted(token.code.microseconds(20).items(), key=lambda item: -item[1])
            print(f"       {i}: " + ", ".join(f"{name} {us:.1f}" for name, us in parts) + " us")
    return row | {"read_gb_s": limit / 1e9}


def main() -> None:
    parser = argument_parser(__doc__, repeats=15)
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--positions", default="32")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--against", type=Path, help="folder with the libraries of another build")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    library, result = begin()
    libraries = [library]
    if options.against is not None:
        other = native.Library(options.against / library.path.name)
        other.check(other.onward_set_num_threads(native.num_threads()), "onward_set_num_threads")
        libraries.append(other)
    for name in options.formats.split(","):
        result[name] = measure(libraries, Format[name.upper()], SHAPES[options.shape], options)
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
