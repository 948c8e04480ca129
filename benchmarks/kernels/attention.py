"""Attention over a cache compared with torch, in the shape of a Qwen3-0.6B layer (16 heads, 8 KV heads, head_dim 128).

    python -m benchmarks.kernels.attention [--repeats 9] [--dtype bfloat16]

Decoding: one token over the caches of all 28 layers, one after the other, which don't fit into a processor cache (and
over one of them alone, which may fit). Figures are microseconds per layer and the rate at which keys and values are
read, next to a plain read of the same memory. Verification: 2, 4 and 8 tokens. Prefill: 512 tokens, causal. The
variants run in turns, and medians are printed; the last line is JSON.
"""

import ctypes
import json
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.common import CODES, Run, begin_with_dtype, medians, repeated
from onward import native
from onward.ops.attention import AttentionArguments

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 8, 128, 28
LENGTHS = (32, 512, 4096)
DRAFTS = (2, 4, 8)
PREFILL = 512

WALKED = 1 << 15  # positions of a measured run, at least: a millisecond or so


@dataclass
class Layer:
    """The keys and values of a layer, full to the end."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def new_layers(count: int, positions: int, dtype: torch.dtype, huge_pages: bool) -> list[Layer]:
    shape = (1, KV_HEADS, positions, HEAD_DIM)
    elements = KV_HEADS * positions * HEAD_DIM
    memory = torch.empty(2 * count * elements, dtype=dtype)
    if huge_pages:
        native.advise_huge_pages(memory.data_ptr(), memory.nbytes)
    memory.normal_()
    parts = [part.view(shape) for part in memory.split(elements)]
    return [Layer(keys, values) for keys, values in zip(parts[::2], parts[1::2], strict=True)]


def arguments(q: Tensor, layer: Layer, offsets: Tensor, out: Tensor) -> AttentionArguments:
    def strides(t: Tensor) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * 3)(*t.stride()[:3])

    return AttentionArguments(
        batch=1,
        heads=HEADS,
        kv_heads=KV_HEADS,
        queries=q.shape[2],
        positions=layer.keys.shape[2],
        dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        q=q.data_ptr(),
        keys=layer.keys.data_ptr(),
        values=layer.values.data_ptr(),
        out=out.data_ptr(),
        q_strides=strides(q),
        keys_strides=strides(layer.keys),
        values_strides=strides(layer.values),
        out_strides=strides(out),
        offsets=offsets.data_ptr(),
        scale=HEAD_DIM**-0.5,
        dtype=CODES[q.dtype],
    )


def ours(library: native.Library, layers: list[Layer], queries: int) -> Run:
    """The last `queries` positions over every layer."""
    dtype, positions = layers[0].keys.dtype, layers[0].keys.shape[2]
    q = torch.randn(1, HEADS, queries, HEAD_DIM).to(dtype)
    out, offsets = torch.empty_like(q), torch.tensor([positions - queries], dtype=torch.int32)
    calls = [ctypes.byref(arguments(q, layer, offsets, out)) for layer in layers]
    function = library.onward_attention

    def run(alive: object = (q, out, offsets, layers)) -> None:
        for call in calls:
            function(call)

    return run


def torchs(layers: list[Layer], queries: int, grouped: bool = False) -> Run:
    """torch's own: with its GQA, or with the heads of a group as queries (for one token the same thing)."""
    q = torch.randn(1, HEADS, queries, HEAD_DIM).to(layers[0].keys.dtype)
    if grouped:
        q = q.view(1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)

    def run() -> None:
        for layer in layers:
            F.scaled_dot_product_attention(q, layer.keys, layer.values, enable_gqa=not grouped, is_causal=queries > 1)

    return run


def read(library: native.Library, layers: list[Layer]) -> Run:
    """Reads the memory of all layers."""
    first, count = layers[0].keys.data_ptr(), sum(layer.nbytes for layer in layers)
    return lambda: library.onward_probe_read(first, count, -(-count // 1024 // 256) * 256)


def decode(
    library: native.Library, positions: int, count: int, dtype: torch.dtype, repeats: int, huge_pages: bool
) -> dict[str, float]:
    layers = new_layers(count, positions, dtype, huge_pages)
    walks = max(1, WALKED // (count * positions))
    runs = [ours(library, layers, 1), torchs(layers, 1), torchs(layers, 1, grouped=True), read(library, layers)]
    taken = medians([repeated(run, walks) for run in runs], repeats)
    one, gqa, grouped, plain = (seconds / walks / count for seconds in taken)
    rate, limit = layers[0].nbytes / one / 1e9, layers[0].nbytes / plain / 1e9
    print(
        f"T=1 over {positions:4}, {count:2} layers{', huge pages' if huge_pages else '':12}: {one * 1e6:7.1f} us, "
        f"{rate:5.1f} GB/s of {limit:5.1f} | torch gqa {gqa * 1e6:7.1f} us ({gqa / one:4.1f}x), "
        f"grouped {grouped * 1e6:7.1f} us ({grouped / one:4.1f}x)",
        flush=True,
    )
    return {"us": one * 1e6, "gb_s": rate, "read_gb_s": limit, "x_gqa": gqa / one, "x_grouped": grouped / one}


def verify(library: native.Library, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """A few tokens over the longest cache, as ratios to one token."""
    layers = new_layers(LAYERS, LENGTHS[-1], dtype, False)
    one, *more = medians([ours(library, layers, queries) for queries in (1, *DRAFTS)], repeats)
    ratios = {f"ratio_{queries}": seconds / one for queries, seconds in zip(DRAFTS, more, strict=True)}
    print(
        f"T over {LENGTHS[-1]}, {LAYERS} layers: " + ", ".join(f"{k[6:]}: {v:.2f}x of T=1" for k, v in ratios.items())
    )
    return ratios


def prefill(library: native.Library, positions: int, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """The last 512 of so many positions, causal. torch aligns its mask elsewhere where they are more: not run."""
    layers = new_layers(1, positions, dtype, False)
    runs = [ours(library, layers, PREFILL)]
    if positions == PREFILL:
        runs.append(torchs(layers, PREFILL))
    seconds, *torch_seconds = medians(runs, repeats)
    pairs = PREFILL * (positions - PREFILL) + PREFILL * (PREFILL + 1) / 2
    row = {"ms": seconds * 1e3, "gflop_s": 4 * HEADS * HEAD_DIM * pairs / seconds / 1e9}
    text = f"T={PREFILL} over {positions}: {row['ms']:6.2f} ms, {row['gflop_s']:5.0f} GFLOP/s"
    if torch_seconds:
        row["x_torch"] = torch_seconds[0] / seconds
        text += f" | torch {torch_seconds[0] * 1e3:.2f} ms ({row['x_torch']:.1f}x)"
    print(text, flush=True)
    return row


def main() -> None:
    library, dtype, options, result = begin_with_dtype(__doc__, repeats=9)
    for positions in LENGTHS:
        for count in (1, LAYERS):
            result[f"decode_{positions}_{count}"] = decode(library, positions, count, dtype, options.repeats, False)
    result["decode_huge_pages"] = decode(library, LENGTHS[-1], LAYERS, dtype, options.repeats, True)
    result["verify"] = verify(library, dtype, options.repeats)
    for positions in (PREFILL, LENGTHS[-1]):
        result[f"prefill_{positions}"] = prefill(library, positions, dtype, options.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
