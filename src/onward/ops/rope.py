"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

from typing import Any

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Backward, Gradients, Operator, like_first, shapes


def rope(
    x: Tensor,
    offsets: Tensor | int,
    *,
    dims: int,
    base: float = 10000.0,
    inv_freqs: Tensor | None = None,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Rotate pairs of features by angles that grow with the position: (offset + index) * scale * inverse frequency.

    The angles are computed in float64, the rotation in float32.

    Args:
        x: float [B, H, T, D].
        offsets: the position of x[:, :, 0], an int for all rows or int32 [B].
        dims: how many features are rotated, even and at most D; the others are unchanged.
        base: the base of the geometric schedule of inverse frequencies, base ** (-2i / dims).
        inv_freqs: float32 [dims / 2], radians per position, instead of that schedule.
        scale: multiplies the position.
        interleaved: pairs are (2i, 2i + 1), as Meta stores them; else (i, i + dims/2), as Hugging Face does.

    Returns:
        [B, H, T, D] in x's dtype.

    Raises:
        RequestError: shapes that don't match.
    """
    if x.dim() != 4 or x.dtype not in DTYPES or not (0 < dims <= x.shape[-1] and dims % 2 == 0):
        raise RequestError(f"rope expects float x [B, H, T, D] and even dims in 2 … D; got dims {dims}, {shapes(x=x)}")
    if inv_freqs is None:
        exponents = torch.arange(0, dims, 2, dtype=torch.float64, device=x.device) / dims
        inv_freqs = (float(base) ** -exponents).to(torch.float32)
    if inv_freqs.shape != (dims // 2,):
        raise RequestError(f"rope: dims {dims} expects inv_freqs [{dims // 2}]; got {shapes(inv_freqs=inv_freqs)}")
    row_offsets = torch.as_tensor(offsets, dtype=torch.int32, device=x.device)
    if row_offsets.dim() == 0:
        row_offsets = row_offsets.expand(x.shape[0])
    if row_offsets.shape != x.shape[:1]:
        raise RequestError(f"rope: offsets must be an int or int32 [B]; got {shapes(offsets=row_offsets, x=x)}")
    positions = row_offsets.unsqueeze(1) + torch.arange(x.shape[2], device=x.device)
    # float64: in float32 the angle at position 10^6 would be off by 0.03.
    radians = (positions.to(torch.float64) * float(scale)).unsqueeze(-1) * inv_freqs.to(torch.float32).to(torch.float64)
    cos, sin = _angles_definition(radians).unbind()
    return rotate(x, cos, sin, interleaved=interleaved)


def rotary_angles(radians: Tensor, *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """float32 [B, T, R] radians -> the cos and sin that `rotate` takes, each float32 [B, T, 2R].

    Both features of a pair need the values, the first with its sin negated. They are computed once for all layers and
    heads. magnitude: multiplies cos and sin, as YaRN does.
    """
    if radians.dim() != 3 or radians.dtype != torch.float32:
        raise RequestError(f"rotary_angles expects float32 radians [B, T, R]; got {shapes(radians=radians)}")
    cos_sin = _angles(radians)
    if magnitude != 1.0:
        cos_sin = cos_sin * magnitude
    return cos_sin[0], cos_sin[1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate each pair of features of x by its position's angle, in float32. Features past 2R are unchanged.

    Args:
        x: float [B, H, T, D].
        cos, sin: float32 [B, T, 2R], 2R <= D, from `rotary_angles`.
        interleaved: pairs are (2i, 2i + 1), as in GLM; else (i, i + R), as in most Hugging Face checkpoints.

    Returns:
        [B, H, T, D] in x's dtype.
    """
    fits = x.dim() == 4 and cos.shape == sin.shape and cos.dim() == 3 and cos.shape[:2] == (x.shape[0], x.shape[2])
    fits = fits and x.dtype in DTYPES and cos.dtype == sin.dtype == torch.float32
    if not fits or cos.shape[-1] > x.shape[-1] or cos.shape[-1] % 2:
        operands = "float x [B, H, T, D] and float32 cos, sin [B, T, 2R]"
        raise RequestError(f"rotate expects {operands}; got {shapes(x=x, cos=cos, sin=sin)}")
    return _rotate(x, cos, sin, bool(interleaved))


def _angles_definition(radians: Tensor) -> Tensor:
    """float32 or float64 [B, T, R] -> float32 [2, B, T, 2R]: cos, then sin."""
    # In float64, so that every machine, and the kernel, rounds to the same float32 or to its neighbour.
    exact = radians.to(torch.float64)
    cos, sin = exact.cos().to(torch.float32), exact.sin().to(torch.float32)
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


@kernel
def onward_rotary_angles(rows: Int, pairs: Int, radians: Pointer, cos: Pointer, sin: Pointer) -> Code: ...


def _call_angles(k: KernelCalls, out: Operand, radians: Operand) -> None:
    radians, rows, pairs, _ = k.rows(k.contiguous(radians))
    k.call(onward_rotary_angles, rows, pairs, k.address(radians), k.address(out), k.address_at(out, out.stride()[0]))


def _rotate_definition(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dims = cos.shape[-1]
    rotated = x[..., :dims]
    if interleaved:
        partners = torch.stack((rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
        cos, sin = (torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2) for halves in (cos, sin))
    else:
        partners = torch.cat((rotated[..., dims // 2 :], rotated[..., : dims // 2]), dim=-1)
    # cos and sin are float32, and so are the products.
    out = torch.addcmul(rotated * cos.unsqueeze(1), partners.to(torch.float32), sin.unsqueeze(1)).to(x.dtype)
    return out if dims == x.shape[-1] else torch.cat((out, x[..., dims:]), dim=-1)


# x_strides, out_strides: int64 [3]; angle_strides: int64 [2]; sin: the half that is not negated
@kernel
def onward_rotate(
    batch: Int, heads: Int, queries: Int, dim: Int, dtype: Code, x: Pointer, x_strides: Pointer, cos: Pointer,
    sin: Pointer, pairs: Int, angle_strides: Pointer, interleaved: Code, out: Pointer, out_strides: Pointer,
) -> Code: ...  # fmt: skip


def _call_rotate(k: KernelCalls, out: Operand, x: Operand, cos: Operand, sin: Operand, interleaved: bool) -> None:
    x = k.contiguous_rows(x)
    k.call(
        onward_rotate, *x.shape, k.code(x), k.address(x), k.int64s(x.stride()[:3]), *angles(k, cos, sin), interleaved,
        k.address(out), k.int64s(out.stride()[:3]),
    )  # fmt: skip


def angles(k: KernelCalls, cos: Operand, sin: Operand) -> tuple[Any, Any, int, Any]:
    """The kernels' arguments for cos and sin [B, T, 2R]: both addresses, R, and the strides of rows and tokens."""
    cos, sin = k.contiguous_rows(cos), k.contiguous_rows(sin)
    if cos.stride() != sin.stride():
        cos, sin = k.contiguous(cos), k.contiguous(sin)
    pairs = cos.shape[-1] // 2
    return k.address(cos), k.address_at(sin, pairs), pairs, k.int64s(cos.stride()[:2])


def _rotate_gradient(backward: Backward, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Gradients:
    if backward.needs[1] or backward.needs[2]:
        return backward.of(_rotate_definition, x, cos, sin, interleaved)
    return (_rotate(backward.grad, cos, -sin, interleaved),)


_rotate = Operator(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    _rotate_definition, _call_rotate, like_first, gradient=_rotate_gradient,
)  # fmt: skip
_angles: Operator[Tensor] = Operator(
    "rotary_angles(Tensor radians) -> Tensor",
    _angles_definition, _call_angles, lambda x: x.new_empty((2, *x.shape[:-1], 2 * x.shape[-1])),
)  # fmt: skip
