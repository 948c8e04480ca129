"""The bytes of contiguous tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def copied_bytes(tensors: Sequence[Tensor]) -> memoryview:
    """A copy of the bytes of contiguous tensors, one after another."""
    copies = [np.asarray(as_bytes(tensor.cpu())) for tensor in tensors]
    return (copies[0].copy() if len(copies) == 1 else np.concatenate(copies)).data


def load_bytes(tensors: Sequence[Tensor], content: memoryview) -> None:
    """Overwrite contiguous tensors with bytes, one after another."""
    start = 0
    for tensor in tensors:
        own = np.frombuffer(content[start : start + tensor.nbytes], np.uint8)
        start += tensor.nbytes
        if tensor.device.type == "cpu":
            np.copyto(np.asarray(as_bytes(tensor)), own)
        else:
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(own.copy()))
