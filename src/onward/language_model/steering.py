"""The `steer` option: vectors by tap, or a control vector in a GGUF file, as llama.cpp and repeng write it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.gguf.blocks import dequantized
from onward.checkpoint.gguf.reader import GgufFile
from onward.errors import OptionError
from onward.models.adapters import Steer, Steering
from onward.util.checks import is_finite

_DIRECTION = re.compile(r"direction\.(\d+)")


def read_steering(steer: object) -> Steering:
    """The option's value, checked as far as that is possible without the model. Raises `OptionError`."""
    if isinstance(steer, str | os.PathLike):
        return Steering(_control_vector(Path(steer)))
    if not isinstance(steer, Mapping) or not steer or not all(isinstance(name, str) for name in steer):
        raise OptionError("steer", f"must map names of taps to vectors, or be a GGUF file; got {steer!r}")
    return Steering({name: _checked(name, value) for name, value in steer.items()})


def _checked(name: str, value: Any) -> Steer:
    """The steer of a tap, with a scaled float32 vector of its own."""
    given = value if isinstance(value, Steer) else Steer(value)
    vector = given.vector
    if isinstance(vector, np.ndarray | list | tuple):
        vector = torch.as_tensor(np.asarray(vector))
    if not isinstance(vector, Tensor) or vector.dim() != 1:
        shape = f"a tensor {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
        raise OptionError("steer", f"needs a vector [D] for {name!r}; got {shape}")
    if not is_finite(given.scale):
        raise OptionError("steer", f"needs a finite scale for {name!r}; got {given.scale!r}")
    scaled = vector.detach().to("cpu", torch.float32) * given.scale
    if not bool(scaled.isfinite().all()):
        raise OptionError("steer", f"has a vector for {name!r} with numbers that are not finite")
    return Steer(scaled.clone(), replace=bool(given.replace))


def _control_vector(path: Path) -> dict[str, Steer]:
    """The vectors of a file, direction.N for the result of layer N."""
    if not path.is_file():
        raise OptionError("steer", f"names no file: {str(path)!r}")
    file = GgufFile(path)
    found = {match[1]: tensor for name, tensor in file.tensors.items() if (match := _DIRECTION.fullmatch(name))}
    kind = file.metadata.get("general.architecture")
    if kind != "controlvector" or not found:
        raise OptionError("steer", f"needs a control vector, and {path} is a GGUF file of {kind!r}")
    return {
        f"layers.{number}": _checked(f"layers.{number}", dequantized(tensor.type, tensor.rows).flatten())
        for number, tensor in found.items()
    }
