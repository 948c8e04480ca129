"""The `steer` and `prompt_embeds` options: vectors by tap, or a control vector in a GGUF file, as llama.cpp and repeng
write it."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.gguf.blocks import dequantized
from onward.checkpoint.gguf.reader import GgufFile
from onward.errors import OptionError, RequestError
from onward.models.adapters import Steer, SteerAt, Steering
from onward.util.checks import is_finite, plain, plain_items
from onward.util.text import brief

EMBEDDING = "embedding"
_DIRECTION = re.compile(r"direction\.(\d+)")


def read_steering(steer: object) -> Steering:
    """The option's value, checked as far as that is possible without the model. Raises `OptionError`."""
    if isinstance(steer, str | os.PathLike):
        steer = read_control_vector(steer)
    if not isinstance(steer, Mapping) or not steer or not all(isinstance(name, str) for name in steer):
        raise OptionError("steer", f"must map names of taps to vectors, or be a GGUF file; got {steer!r}")
    return Steering({name: _checked(name, value) for name, value in steer.items()})


def read_prompt_embeds(embeds: object) -> Steering:
    """The option's value, which replaces the first layer's input. Raises `OptionError`."""
    option = "prompt_embeds"
    if not isinstance(embeds, Mapping) or not embeds:
        raise OptionError(option, f"must map first positions to tensors [N, D]; got {brief(embeds)}")
    if wrong := [first for first in embeds if not _is_position(first)]:
        raise OptionError(option, f"must map first positions, whole numbers from 0 on; got {wrong[0]!r}")
    vectors: list[Tensor] = []
    positions: list[int] = []
    for first, value in sorted(embeds.items()):
        vectors.append(_vectors(option, f"position {first}", value, dims=(2,), shape="[N, D]"))
        if positions and first <= positions[-1]:
            raise OptionError(option, f"has two vectors for position {first}: tensors must not overlap")
        if vectors[0].shape[1] != vectors[-1].shape[1]:
            widths = f"{vectors[0].shape[1]} and {vectors[-1].shape[1]}"
            raise OptionError(option, f"must have vectors of one width; got {widths}")
        positions += range(first, first + len(vectors[-1]))
    return Steering({EMBEDDING: Steer(torch.cat(vectors), replace=True, at=positions)}, option)


def combined(steer: Steering, embeds: Steering) -> Steering:
    """The steering of both options. Raises `OptionError` if they exclude each other."""
    if EMBEDDING in steer.steers:
        raise OptionError("prompt_embeds", f"and a steer of {EMBEDDING!r} exclude each other: give one of them")
    return Steering({**steer.steers, **embeds.steers})


def _checked(name: str, value: Any) -> Steer:
    """The steer of a tap, with scaled float32 vectors of its own."""
    steer = value if isinstance(value, Steer) else Steer(value)
    if not is_finite(steer.scale):
        raise OptionError("steer", f"needs a finite scale for {name!r}; got {steer.scale!r}")
    vectors = _vectors("steer", repr(name), steer.vector, dims=(1, 2), shape="[D] or [N, D]", scale=steer.scale)
    return Steer(vectors.clone(), replace=bool(steer.replace), at=_checked_at(name, steer.at))


def _vectors(option: str, place: str, value: Any, *, dims: Sequence[int], shape: str, scale: float = 1.0) -> Tensor:
    """The value as float32 on the CPU, scaled."""
    if isinstance(value, np.ndarray | list | tuple):
        value = torch.as_tensor(np.asarray(value))
    if not isinstance(value, Tensor) or value.dim() not in dims or not value.numel():
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OptionError(option, f"needs a vector {shape} for {place}; got {got}")
    scaled = value.detach().to("cpu", torch.float32) * scale
    if not bool(scaled.isfinite().all()):
        raise OptionError(option, f"has a vector for {place} with numbers that are not finite")
    return scaled


def _checked_at(name: str, at: Any) -> SteerAt:
    if isinstance(at, str) and at in ("all", "prompt", "new"):
        return at  # type: ignore[return-value]
    if isinstance(at, slice):
        ends = [plain(end) for end in (at.start or 0, at.stop, at.step) if end is not None]
        if all(map(_is_position, ends)) and at.step != 0:
            return slice(*(None if end is None else int(end) for end in (at.start, at.stop, at.step)))
    elif isinstance(at, range):
        if len(at) and at.start >= 0 and at.step > 0:
            return at
    elif isinstance(at, Sequence | np.ndarray | Tensor) and not isinstance(at, str):
        positions = plain_items(at)
        if positions and all(map(_is_position, positions)) and len(set(positions)) == len(positions):
            return positions
    raise OptionError(
        "steer",
        f'needs for {name!r} at="all", "prompt", "new", a slice, or a list of distinct positions from 0; got '
        f"{brief(at)}",
    )


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_control_vector(source: str | os.PathLike[str], *, scale: float = 1.0, at: SteerAt = "all") -> dict[str, Steer]:
    """A control vector of llama.cpp or repeng, as a value of `steer`: its direction.N is added to "layers.N".

    source: a GGUF file. scale, at: as in `onward.Steer`.

    Raises:
        RequestError: no such file, or it is no control vector. CheckpointError: it is damaged.
    """
    path = Path(source)
    if not path.is_file():
        raise RequestError(f"there is no file {str(path)!r}: a control vector is a GGUF file", "steer")
    file = GgufFile(path)
    found = {match[1]: tensor for name, tensor in file.tensors.items() if (match := _DIRECTION.fullmatch(name))}
    kind = file.metadata.get("general.architecture")
    if kind != "controlvector" or not found:
        raise RequestError(f"{path} is no control vector: it is a GGUF file of {kind!r}", "steer")
    steers = {
        f"layers.{number}": Steer(dequantized(tensor.type, tensor.rows).flatten()) for number, tensor in found.items()
    }
    return changed(steers, scale=scale, at=at)


def changed(steers: Mapping[str, Steer], *, scale: float = 1.0, at: SteerAt = "all") -> dict[str, Steer]:
    """The same vectors with another scale and other positions, checked."""
    return {name: _checked(name, replace(steer, scale=scale, at=at)) for name, steer in steers.items()}
