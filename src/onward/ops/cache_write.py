"""Storing new keys or values in a dense cache."""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops.autocast import autocast_dtype
from onward.ops.operators import DTYPES, define_in_place, shapes, usable_library


def write_cache(cache: Tensor, new: Tensor, offsets: Tensor) -> None:
    """cache[b, :, offsets[b] : offsets[b] + T] = new[b], in place.

    Args:
        cache: [B, G, S, D].
        new: [B, G, T, D], of the cache's dtype.
        offsets: int32 [B], each row's own; offsets[b] + T <= S.

    Raises:
        RequestError: shapes or dtypes that do not fit; eagerly on the CPU also a row that reaches past the cache.
    """
    if new.dtype != cache.dtype and autocast_dtype(new) is not None:
        new = new.to(cache.dtype)
    batch, heads, _, dim = new.shape
    fits = cache.dim() == 4 and (cache.shape[0], cache.shape[1], cache.shape[3]) == (batch, heads, dim)
    if not fits or cache.dtype != new.dtype or offsets.shape != (batch,):
        raise RequestError(f"a cache [B, G, S, D] wants new [B, G, T, D]; got {shapes(cache=cache, new=new)}")
    if torch.compiler.is_compiling() or type(new) is not Tensor or new.device.type != "cpu":
        torch.ops.onward.write_cache(cache, new, offsets)
    else:
        _write_rows(cache, new, offsets)


def _definition(cache: Tensor, new: Tensor, offsets: Tensor) -> None:
    positions = offsets.unsqueeze(1) + torch.arange(new.shape[2], device=new.device)
    rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
    # Indexing dimensions 0 and 2 around a slice puts the indexed ones first: [B, T, G, D].
    cache[rows, :, positions] = new.transpose(1, 2)


def _write_rows(cache: Tensor, new: Tensor, offsets: Tensor) -> None:
    queries = new.shape[2]
    for b, offset in enumerate(offsets.tolist()):
        if not 0 <= offset <= cache.shape[2] - queries:
            raise RequestError(f"a cache of {cache.shape[2]} positions has no room for {queries} at {offset}")
        _copy(cache[b, :, offset : offset + queries], new[b])


def _copy(to: Tensor, new: Tensor) -> None:
    """Copy new [G, T, D] into part of a row of the cache, with the native threads where there is a library."""
    library = usable_library()
    if library is None or new.dtype not in DTYPES or new.stride(-1) != 1 or to.stride(-1) != 1:
        to.copy_(new)
        return
    heads, queries, dim = new.shape
    code, size = DTYPES[new.dtype], new.element_size()
    for head in range(heads):
        status = library.onward_convert(
            queries, dim, new.data_ptr() + head * new.stride(0) * size, code, new.stride(1),
            to.data_ptr() + head * to.stride(0) * size, code, to.stride(1),
        )  # fmt: skip
        library.check(status, "onward_convert")


define_in_place("write_cache(Tensor(a!) cache, Tensor new, Tensor offsets) -> ()", _definition, on_cpu=_write_rows)
