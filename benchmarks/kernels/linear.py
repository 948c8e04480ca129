"""How far packed `linear` is from the machine's limits, over the matrices of a Qwen3-0.6B-shaped model.

    python -m benchmarks.kernels.linear [--repeats 9] [--formats bf16,int8,int4,iq4_nl]

One pass over all 113 matrices for each number of rows T, beside a plain read of the same memory; then one
layer at T = 512 beside torch's bf16 `linear` and the peak of the arithmetic units. What is compared is run
in turns, and medians are printed; the last line is JSON.
"""

import json
from collections.abc import Sequence

import torch

from benchmarks.kernels.common import Run, argument_parser, begin, medians
from onward import native
from onward.native.interface import DType, Format
from onward.ops.packed import LinearArguments

LAYER = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # [outputs, inputs]
MODEL = LAYER * 28 + [(151_936, 1024)]
ROWS = (1, 2, 4, 8, 16)
PREFILL = 512
ALIGNMENT = 2 << 20
# The kind of arithmetic (of onward_probe_arithmetic) that a format runs on, and operations in 16 lanes of it.
ARITHMETIC = {
    Format.F32: (0, 32),
    Format.F16: (0, 32),
    Format.BF16: (1, 64),
    Format.INT8: (2, 128),
    Format.INT4: (2, 128),
    Format.IQ4_NL: (2, 128),
}


class Weights:
    """Packed matrices, one after the other. Their values do not matter, only that no scale is a NaN."""

    def __init__(self, library: native.Library, fmt: Format, shapes: Sequence[tuple[int, int]]) -> None:
        self.library, self.format, self.shapes = library, fmt, shapes
        sizes = [library.onward_linear_packed_bytes(fmt, rows, inputs) for rows, inputs in shapes]
        self.bytes = sum(sizes)
        self.memory = torch.empty(self.bytes + 2 * ALIGNMENT, dtype=torch.uint8)
        first = -(-self.memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        native.advise_huge_pages(first, self.bytes)
        self.memory.fill_(0x11)
        self.addresses = [first + sum(sizes[:i]) for i in range(len(sizes))]

    def read(self, pieces: int) -> Run:
        """Reads all of it, cut into so many pieces for the threads."""
        count = self.bytes // 256 * 256
        return lambda: self.library.onward_probe_read(self.addresses[0], count, -(-count // pieces))

    def linear(self, rows: int) -> Run:
        """One pass of bf16 activations through all matrices."""
        widest = max(inputs for _, inputs in self.shapes)
        x = torch.randn(rows, widest).bfloat16()
        out = torch.empty(rows, max(outputs for outputs, _ in self.shapes), dtype=torch.bfloat16)
        bf16, function = DType.BF16, self.library.onward_linear_many
        calls = [
            (
                LinearArguments(n=outputs, packed=address, out=out.data_ptr(), out_stride=outputs, out_dtype=bf16),
                1, self.format, rows, inputs, x.data_ptr(), bf16, widest,
            )
            for (outputs, inputs), address in zip(self.shapes, self.addresses, strict=True)
        ]  # fmt: skip

        def run(kept: object = (self.memory, x, out)) -> None:
            for call in calls:
                function(*call)

        return run


def streams(library: native.Library, fmt: Format, repeats: int) -> dict[str, float]:
    """T of a few: the passes against the time it takes to read the weights."""
    weights = Weights(library, fmt, MODEL)
    reads = [weights.read(pieces) for pieces in (native.num_threads(), 1024)]
    read, chunked, *passes = medians([*reads, *(weights.linear(rows) for rows in ROWS)], repeats)
    limit = weights.bytes / min(read, chunked)
    row = {"read_gb_s": limit / 1e9, "fraction": weights.bytes / passes[0] / limit}
    row |= {f"ms_{t}": seconds * 1e3 for t, seconds in zip(ROWS, passes, strict=True)}
    row |= {f"ratio_{t}": seconds / passes[0] for t, seconds in zip(ROWS, passes, strict=True)}
    print(
        f"{fmt.name.lower():>5}  read {limit / 1e9:5.1f} GB/s | T=1 {passes[0] * 1e3:6.2f} ms, "
        f"{weights.bytes / passes[0] / 1e9:5.1f} GB/s = {row['fraction']:.2f} | "
        + "  ".join(f"T={t} {row[f'ratio_{t}']:.2f}x" for t in ROWS[1:]),
        flush=True,
    )
    return row


def prefill(library: native.Library, formats: Sequence[Format], repeats: int) -> dict[str, dict[str, float]]:
    """T = 512 through one layer."""
    operations = sum(2 * PREFILL * outputs * inputs for outputs, inputs in LAYER)
    pairs = [(torch.randn(PREFILL, k).bfloat16(), torch.randn(n, k).bfloat16()) for n, k in LAYER]
    steps = 2_000_000
    kinds = sorted({ARITHMETIC[fmt][0] for fmt in formats})
    peaks: list[Run] = [lambda kind=kind: library.onward_probe_arithmetic(kind, steps) for kind in kinds]
    torch_run: Run = lambda: [torch.nn.functional.linear(x, w) for x, w in pairs]  # noqa: E731
    runs = [torch_run, *(Weights(library, fmt, LAYER).linear(PREFILL) for fmt in formats), *peaks]
    torch_s, *rest = medians(runs, repeats)
    taken, peak_s = rest[: len(formats)], rest[len(formats) :]
    per_lane = dict(ARITHMETIC.values())
    count = steps * 24 * native.num_threads()  # steps of all threads, see probe.cpp
    peak = {kind: count * per_lane[kind] / s for kind, s in zip(kinds, peak_s, strict=True)}
    print(f"T={PREFILL}  torch bf16 {operations / torch_s / 1e12:.2f} TFLOP/s")
    rows = {}
    for fmt, seconds in zip(formats, taken, strict=True):
        rate, limit = operations / seconds, peak[ARITHMETIC[fmt][0]]
        rows[fmt.name.lower()] = {"tflop_s": rate / 1e12, "peak": limit / 1e12, "over_torch": torch_s / seconds}
        print(
            f"{fmt.name.lower():>5}  {rate / 1e12:.2f} T(FL)OP/s of {limit / 1e12:.2f} = {rate / limit:.2f} | "
            f"{torch_s / seconds:.2f}x torch's bf16"
        )
    return rows


def rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argument_parser(__doc__, repeats=7)
    parser.add_argument("--formats", default="bf16,int8,int4", help="of f32, bf16, f16, int8, int4")
    options = parser.parse_args()
    formats = [Format[name.upper()] for name in options.formats.split(",")]
    library, result = begin()
    result["streams"] = {fmt.name.lower(): streams(library, fmt, options.repeats) for fmt in formats}
    result["prefill"] = prefill(library, formats, options.repeats)
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
