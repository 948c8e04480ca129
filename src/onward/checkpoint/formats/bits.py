"""Small integers packed into larger ones, and scales shared by groups of inputs."""

import torch
from torch import Tensor


def unpacked(packed: Tensor, bits: int, dim: int, *, is_stream: bool = True) -> Tensor:
    """int32 [M, N] -> int32 with 32 / bits times as many along `dim`: the fields of each integer, lowest bits first.

    is_stream: whether fields of a width that does not divide 32 span two integers, so that `bits` integers hold 32
    fields; otherwise each holds 32 // bits whole ones.
    """
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(f"packed integers must be int32 [M, N]; got {packed.dtype} {list(packed.shape)}")
    if 32 % bits and is_stream:
        return _unpacked_stream(packed, bits) if dim else _unpacked_stream(packed.T, bits).T
    shifts = torch.arange(0, 33 - bits, bits, dtype=torch.int32)
    fields: Tensor = (packed.unsqueeze(dim + 1) >> (shifts if dim else shifts.unsqueeze(1))) & (2**bits - 1)
    return fields.flatten(dim, dim + 1)


def _unpacked_stream(packed: Tensor, bits: int) -> Tensor:
    """int32 [M, N * bits] -> int32 [M, N * 32]: the fields of runs of `bits` integers."""
    if packed.shape[1] % bits:
        raise ValueError(f"{bits}-bit integers are packed into runs of {bits}; got {packed.shape[1]}")
    words = packed.reshape(len(packed), -1, bits).long() & 0xFFFFFFFF
    starts = torch.arange(32) * bits
    first, shifts = starts // 32, starts % 32
    # If a field ends inside its integer, the bits from the next one lie above the mask.
    fields = words[..., first] >> shifts | words[..., (first + 1).clamp(max=bits - 1)] << (32 - shifts)
    streamed: Tensor = (fields & (2**bits - 1)).to(torch.int32).flatten(1)
    return streamed


def by_group(scales: Tensor, group: int, inputs: int) -> Tensor:
    """[N, K / group] -> [N, K], each group's number repeated for its inputs."""
    if scales.shape[1] != (count := -(-inputs // group)):
        raise ValueError(f"{inputs} inputs in groups of {group} require {count} scales; got {scales.shape[1]}")
    return scales.repeat_interleave(group, dim=1)[:, :inputs]


def by_block(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """[⌈N / block[0]⌉, ⌈K / block[1]⌉] -> [N, K]."""
    check_blocks(scales, block, shape)
    whole = scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return whole[: shape[0], : shape[1]]


def check_blocks(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Raise ValueError unless there is a scale for each block of a weight [N, K]."""
    expected = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    if tuple(scales.shape) != expected:
        got, shapes = list(scales.shape), f"{list(shape)} in blocks of {list(block)}"
        raise ValueError(f"a weight {shapes} requires scales {list(expected)}; got {got}")


# The values of FP4 codes (E2M1, OCP Microscaling Formats, arXiv 2310.10537).
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [N, K / 2] -> int64 [N, K], the low four bits first."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed 4-bit codes must be uint8; got {packed.dtype}")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
