"""Packed `linear` compared with the machine's limits, for the matrices of a model in the shape of Qwen3-0.6B.

    python -m benchmarks.kernels.linear [--repeats 9] [--formats bf16,int8,int4,iq4_nl] [--isas avx512vnni,avx2]

One pass over all 113 matrices for each number of rows T, next to a plain read of the same memory; then one layer at
T = 512 next to torch's bf16 `linear` and the peak of the arithmetic units. The variants and instruction sets run in
turns, and medians are printed; the last line is JSON.
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

    def read(self, pieces: int, isa: str | None = None) -> Run:
        """Reads all of it, cut into so many pieces for the threads."""
        count = self.bytes // 256 * 256
        library = self.library if isa is None else library_of(isa)
        return in_isa(isa, lambda: library.onward_probe_read(self.addresses[0], count, -(-count // pieces)))

    def linear(self, rows: int, isa: str | None = None) -> Run:
        """One pass of bf16 activations through all matrices; isa: of the kernels, if not the present one."""
        library = self.library if isa is None else library_of(isa)
        widest = max(inputs for _, inputs in self.shapes)
        x = torch.randn(rows, widest).bfloat16()
        out = torch.empty(rows, max(outputs for outputs, _ in self.shapes), dtype=torch.bfloat16)
        bf16, function = DType.BF16, library.onward_linear_many
        calls = [
            (
                LinearArguments(n=outputs, packed=address, out=out.data_ptr(), out_stride=outputs, out_dtype=bf16),
                1, self.format, rows, inputs, x.data_ptr(), bf16, widest,
            )
            for (outputs, inputs), address in zip(self.shapes, self.addresses, strict=True)
        ]  # fmt: skip

        def run(alive: object = (self.memory, x, out)) -> None:
            for call in calls:
                function(*call)

        return in_isa(isa, run)


def library_of(isa: str) -> native.Library:
    native.select_isa(isa)
    library = native.library()
    assert library is not None
    return library


def in_isa(isa: str | None, run: Run) -> Run:
    """The same with the threads of the library of `isa`, which the first of two calls wakes."""

    def there() -> None:
        if isa is not None and native.isa() != isa:
            native.select_isa(isa)
        run()

    return there


def streams(isas: Sequence[str], fmt: Format, repeats: int) -> dict[str, dict[str, float]]:
    """T of a few: the passes against the time it takes to read the weights."""
    weights = Weights(library_of(isas[0]), fmt, MODEL)
    reads = [weights.read(pieces, isa) for isa in isas for pieces in (native.num_threads(), 1024)]
    passes = [weights.linear(rows, isa) for rows in ROWS for isa in isas]
    times = medians([*reads, *passes], repeats)
    limit = weights.bytes / min(times[: len(reads)])
    rows = {}
    for i, isa in enumerate(isas):
        seconds = times[len(reads) + i :: len(isas)]
        rows[isa] = row = {"read_gb_s": limit / 1e9, "fraction": weights.bytes / seconds[0] / limit}
        row |= {f"ms_{t}": each * 1e3 for t, each in zip(ROWS, seconds, strict=True)}
        row |= {f"ratio_{t}": each / seconds[0] for t, each in zip(ROWS, seconds, strict=True)}
        print(
            f"{fmt.name.lower():>5} {isa:>10}  read {limit / 1e9:5.1f} GB/s | T=1 {seconds[0] * 1e3:6.2f} ms, "
            f"{weights.bytes / seconds[0] / 1e9:5.1f} GB/s = {row['fraction']:.2f} | "
            + "  ".join(f"T={t} {row[f'ratio_{t}']:.2f}x" for t in ROWS[1:]),
            flush=True,
        )
    return rows


def prefill(isas: Sequence[str], formats: Sequence[Format], repeats: int) -> dict[str, dict[str, float]]:
    """T = 512 through one layer."""
    operations = sum(2 * PREFILL * outputs * inputs for outputs, inputs in LAYER)
    pairs = [(torch.randn(PREFILL, k).bfloat16(), torch.randn(n, k).bfloat16()) for n, k in LAYER]
    steps = 2_000_000
    torch_run: Run = lambda: [torch.nn.functional.linear(x, w) for x, w in pairs]  # noqa: E731
    weights = {fmt: Weights(library_of(isas[0]), fmt, LAYER) for fmt in formats}
    runs, peaks, counts = {}, {}, {}
    for isa in isas:
        library = library_of(isa)
        counts[isa] = library.onward_probe_arithmetic(0, steps)  # steps of all threads
        runs |= {(fmt, isa): weights[fmt].linear(PREFILL, isa) for fmt in formats}
        for kind in sorted({ARITHMETIC[fmt][0] for fmt in formats}):
            probe: Run = lambda library=library, kind=kind: library.onward_probe_arithmetic(kind, steps)  # noqa: E731
            peaks[kind, isa] = in_isa(isa, probe)
    torch_s, *rest = medians([torch_run, *runs.values(), *peaks.values()], repeats)
    taken = dict(zip(runs, rest[: len(runs)], strict=True))
    peak_s = dict(zip(peaks, rest[len(runs) :], strict=True))
    per_lane = dict(ARITHMETIC.values())
    print(f"T={PREFILL}  torch bf16 {operations / torch_s / 1e12:.2f} TFLOP/s")
    rows = {}
    for fmt, isa in runs:
        kind = ARITHMETIC[fmt][0]
        seconds, limit = taken[fmt, isa], counts[isa] * per_lane[kind] / peak_s[kind, isa]
        rate = operations / seconds
        rows[f"{fmt.name.lower()} {isa}"] = {
            "tflop_s": rate / 1e12, "peak": limit / 1e12, "over_torch": torch_s / seconds,
        }  # fmt: skip
        print(
            f"{fmt.name.lower():>5} {isa:>10}  {rate / 1e12:.2f} T(FL)OP/s of {limit / 1e12:.2f} = {rate / limit:.2f}"
            f" | {torch_s / seconds:.2f}x torch's bf16"
        )
    return rows


def rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argument_parser(__doc__, repeats=7)
    parser.add_argument("--formats", default="bf16,int8,int4", help="of f32, bf16, f16, int8, int4")
    parser.add_argument("--isas", default=native.isa(), help="instruction sets, in turns")
    options = parser.parse_args()
    formats, isas = [Format[name.upper()] for name in options.formats.split(",")], options.isas.split(",")
    _, result = begin()
    result["streams"] = {fmt.name.lower(): streams(isas, fmt, options.repeats) for fmt in formats}
    result["prefill"] = prefill(isas, formats, options.repeats)
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
