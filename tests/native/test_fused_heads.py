"""onward_heads has the bits of rms_norm, rotate and a copy, one after the other."""

import ctypes
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import CODES, DTYPES, call, poisoned, rms_norm, rotate, strides
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.ops.heads import HeadsArguments

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
EPS = 1e-6


@dataclass
class Part:
    """x [B, H, T, D] and what becomes of it; `out` is such a tensor or a cache [B, H, S, D]."""

    x: Tensor
    out: Tensor
    weight: Tensor | None = None
    weight_offset: float = 0.0
    after_cast: bool = True
    rotate: int = 0  # 1: pairs of halves; 2: interleaved
    to_cache: bool = False

    def arguments(self) -> HeadsArguments:
        return HeadsArguments(
            heads=self.x.shape[1], x=self.x.data_ptr(), x_strides=strides(self.x, 3),
            norm_weight=None if self.weight is None else self.weight.data_ptr(), eps=EPS,
            weight_offset=self.weight_offset, after_cast=self.after_cast, rotate=self.rotate, out=self.out.data_ptr(),
            out_strides=strides(self.out, 3), to_cache=self.to_cache, positions=self.out.shape[2],
        )  # fmt: skip

    def separately(self, cos: Tensor, sin: Tensor, offsets: Tensor) -> Tensor:
        """The expected contents of `out`."""
        x = self.x.contiguous()
        if self.weight is not None and x.numel():
            rows = x.view(-1, x.shape[-1])
            x = rms_norm(
                rows, self.weight, eps=EPS, offset=self.weight_offset, after_cast=self.after_cast
            ).view(x.shape)  # fmt: skip
        if self.rotate:
            x = rotate(x, cos, sin, interleaved=self.rotate == 2)
        if not self.to_cache:
            return x
        out = self.out.clone()
        for b, offset in enumerate(offsets.tolist()):
            out[b, :, offset : offset + x.shape[2]] = x[b]
        return out


def heads(parts: list[Part], cos: Tensor, sin: Tensor, offsets: Tensor, shape: tuple[int, int, int]) -> None:
    """shape: B, T, D."""
    arguments = (HeadsArguments * len(parts))(*(part.arguments() for part in parts))
    dtype = parts[0].x.dtype if parts else torch.float32
    call(
        "onward_heads", arguments, len(parts), *shape, CODES[dtype], cos.data_ptr(), sin.data_ptr(), strides(cos, 2),
        cos.shape[-1], offsets.data_ptr(),
    )  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN for NaN too."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


@given(
    batch=st.integers(1, 3), queries=st.sampled_from((1, 2, 5, 40)), dim=st.sampled_from((1, 2, 34, 64, 128, 200)),
    quarter=st.booleans(), counts=st.lists(st.sampled_from((0, 1, 3, 16)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES), threads=st.integers(1, 4), seed=st.integers(0, 2**31), data=st.data(),
)  # fmt: skip
@per_isa
def test_heads_have_the_bits_of_the_separate_kernels(
    isa: str, batch: int, queries: int, dim: int, quarter: bool, counts: list[int], dtype: torch.dtype, threads: int,
    seed: int, data: st.DataObject,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    pairs = dim // 4 if quarter else dim // 2
    # Cosines and sines of one array, as the angles of `onward.ops` lie: longer strides than they need.
    angles = torch.randn(batch, queries, 2 * pairs, generator=generator)
    cos, sin = angles[..., :pairs], angles[..., pairs:]
    positions = queries + 9
    offsets = torch.randint(0, 10, (batch,), generator=generator, dtype=torch.int32)
    parts = []
    for count in counts:
        # As a projection leaves them: [B, T, H, D].
        x = torch.randn(batch, queries, count, dim, generator=generator).to(dtype).transpose(1, 2)
        part = Part(
            x, x, rotate=data.draw(st.integers(0, 2), "rotate"), to_cache=data.draw(st.booleans(), "to_cache")
        )  # fmt: skip
        if data.draw(st.booleans(), "norm"):
            part.weight = torch.randn(dim, generator=generator).to(dtype)
            part.weight_offset, part.after_cast = data.draw(st.sampled_from(((0.0, True), (1.0, False))), "weight")
        if part.to_cache:
            part.out = torch.randn(batch, count, positions, dim, generator=generator).to(dtype)
        elif data.draw(st.booleans(), "apart"):
            part.out = poisoned((batch, count, queries, dim), dtype)
        parts.append(part)
    wanted = [part.separately(cos, sin, offsets) for part in parts]
    native.set_num_threads(threads)
    heads(parts, cos, sin, offsets, (batch, queries, dim))
    assert all(same_bits(part.out, want) for part, want in zip(parts, wanted, strict=True))


@pytest.mark.parametrize("offsets", [(0, -1), (3, 0), (2**31 - 1, 0)])
def test_heads_that_exceed_the_cache_change_nothing(isa: str, offsets: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 2, 16)
    plain, cache = Part(x, poisoned(x.shape, x.dtype)), Part(x, poisoned((2, 3, 4, 16), x.dtype), to_cache=True)
    cos = sin = torch.ones(2, 2, 8)
    with pytest.raises(NativeError, match="onward_heads failed: bad argument"):
        heads([plain, cache], cos, sin, torch.tensor(offsets, dtype=torch.int32), (2, 2, 16))
    assert plain.out.isnan().all()
    assert cache.out.isnan().all()


@pytest.mark.parametrize(("shape", "pairs"), [((-1, 1, 8), 4), ((1, -1, 8), 4), ((1, 1, -8), 0), ((1, 1, 8), 5)])
def test_invalid_shapes_are_refused(isa: str, shape: tuple[int, int, int], pairs: int) -> None:
    angles = torch.ones(1, 1, 8)
    with pytest.raises(NativeError, match="bad argument"):
        call(
            "onward_heads",
            None,
            0,
            *shape,
            0,
            angles.data_ptr(),
            angles.data_ptr(),
            (ctypes.c_int64 * 2)(),
            pairs,
            None,
        )


def test_angles_and_offsets_are_optional_without_rotation_and_cache(isa: str) -> None:
    x = torch.randn(1, 2, 3, 8)
    part = Part(x, poisoned(x.shape, x.dtype))
    call("onward_heads", (HeadsArguments * 1)(part.arguments()), 1, 1, 3, 8, 0, None, None, None, 0, None)
    assert torch.equal(part.out, x)


@pytest.mark.parametrize("missing", ["angles", "offsets"])
def test_missing_angles_and_offsets_are_refused(isa: str, missing: str) -> None:
    x = torch.randn(1, 2, 3, 8)
    part = Part(x, poisoned(x.shape, x.dtype), rotate=missing == "angles", to_cache=missing == "offsets")
    with pytest.raises(NativeError, match="bad argument"):
        call("onward_heads", (HeadsArguments * 1)(part.arguments()), 1, 1, 3, 8, 0, None, None, None, 4, None)
    assert part.out.isnan().all()
