"""Packed copies of params that will not change, made once for all programs of a forward."""

from torch import Tensor

from onward.ops import NativeWeight
from onward.ops.packed import pack_native
from onward.program.arrays import Array


class PackedParams:
    """Packed copies by the memory of the stock matrices. They live as long as this does."""

    def __init__(self) -> None:
        self._packed: dict[tuple[object, ...], NativeWeight] = {}

    def of(self, weight: Array) -> NativeWeight | None:
        """The packed copy of a matrix [N, K] among the params; None where there is no layout for it."""
        tensor = weight.storage.tensor
        if tensor is None or tensor.device.type != "cpu":
            return None
        key = (tensor.data_ptr(), weight.dtype, weight.shape, weight.strides, weight.offset)
        if key not in self._packed:
            packed = pack_native(_matrix(tensor.detach(), weight))
            if packed is None:
                return None
            self._packed[key] = packed
        return self._packed[key]


def _matrix(tensor: Tensor, weight: Array) -> Tensor:
    return tensor.as_strided(weight.shape, weight.strides, tensor.storage_offset() + weight.offset)
