"""Run a forward once on tensors without memory, and record its operators."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from onward.errors import OnwardError, ProgramError, one_line
from onward.ops.tap import check_taps, reading
from onward.program.graph import Array, Infer, Kind, Trace
from onward.program.recorder import Recorder, TraceError, line_of, run


def trace(
    forward: Callable[..., Any],
    params: Any,
    cache: Any,
    batch: int,
    tokens: int,
    logits_at: tuple[int, int] | None = None,
    *,
    whole: Callable[[OpOverload], bool],
    infer: Mapping[OpOverload, Infer],
    taps: tuple[str, ...] = (),
) -> Trace:
    """Run `forward` on tensors without memory.

    Args:
        forward: (tokens int32 [B, T], offsets int32 [B], cache, params) -> (logits [B, T, V], cache).
        params, cache: only their shapes, dtypes and strides matter.
        batch, tokens: B, T.
        logits_at: (R, N); the forward gets the keyword `logits_at`, int64 [R, N], and returns logits [R, N, V].
        whole, infer: as in `Recorder`.
        taps: the taps to read (`onward.ops.tap`).

    Raises:
        TraceError: the forward reads values, closes over tensors, or breaks the contract of its return value.
    """
    recorder = Recorder(whole, infer)
    # Autocast is disabled because the program also serves calls outside of autocast.
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        inputs = {
            Kind.TOKENS: recorder.input((batch, tokens), torch.int32, Kind.TOKENS),
            Kind.OFFSETS: recorder.input((batch,), torch.int32, Kind.OFFSETS),
        }
        if logits_at is not None:
            inputs[Kind.LOGITS_AT] = recorder.input(logits_at, torch.int64, Kind.LOGITS_AT)
        options = {} if logits_at is None else {"logits_at": inputs[Kind.LOGITS_AT]}
        traced_params = _stand_ins(recorder, params, Kind.PARAM)
        traced_cache = _stand_ins(recorder, cache, Kind.CACHE)
        with recorder, reading(taps) as values:
            try:
                result = run(forward, inputs[Kind.TOKENS], inputs[Kind.OFFSETS], traced_cache, traced_params, **options)
            except TraceError:
                raise
            except ProgramError as error:
                raise TraceError(f"{error} ({line_of(error)})") from error
            except OnwardError:
                raise
            except Exception as error:
                raise TraceError(f"the forward cannot be traced: {one_line(error)} ({line_of(error)})") from error
        traced = recorder.trace
        traced.inputs = {kind: recorder.array(tensor) for kind, tensor in inputs.items()}
        traced.cache = _arrays(recorder, traced_cache)
        _check_result(result, traced_cache, (batch, tokens) if logits_at is None else logits_at)
        traced.logits = recorder.array(result[0])
        check_taps(values, taps, (batch, tokens))
        traced.taps = {name: recorder.array(values[name]) for name in taps}
        traced.returned_cache = _arrays(recorder, result[1])
    return traced


def _stand_ins(recorder: Recorder, tree: Any, kind: Kind) -> Any:
    return pytree.tree_map_with_path(
        lambda path, leaf: (
            recorder.stand_in(leaf, kind, f"{kind.value}{pytree.keystr(path)}") if isinstance(leaf, Tensor) else leaf
        ),
        tree,
    )


def _arrays(recorder: Recorder, tree: Any) -> list[Array]:
    return [recorder.array(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _check_result(result: Any, cache: Any, logits_shape: tuple[int, int]) -> None:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise TraceError(f"a forward must return (logits, cache); got {_described(result)}")
    logits, returned = result
    if logits.dim() != 3 or tuple(logits.shape[:2]) != logits_shape or not logits.is_floating_point():
        raise TraceError(f"a forward must return float logits {[*logits_shape, 'V']}; got {_described(logits)}")
    before, spec_before = pytree.tree_flatten(cache)
    after, spec_after = pytree.tree_flatten(returned)
    if spec_before != spec_after:
        raise TraceError(
            f"a forward must return the cache with the structure of its input; it got {spec_before} and returned "
            f"{spec_after}"
        )
    for old, new in zip(before, after, strict=True):
        if _described(old) != _described(new):
            raise TraceError(
                f"a forward must return a cache with its input's shapes: {_described(old)} became {_described(new)}"
            )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value) if isinstance(value, int | float | str | bool | None) else f"a {type(value).__name__}"
