"""Programs have the bits of separate calls, while idle threads prefetch; and the team sleeps afterwards."""

import ctypes
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import attention, poisoned, strides
from packed import Packed
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.native.interface import DType, Format
from onward.ops.attention import AttentionArguments
from onward.ops.packed import LinearArguments

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
F32 = DType.F32


class Program:
    """Instructions for `onward_program_run`: the arguments are integers, tensors and ctypes objects."""

    def __init__(self) -> None:
        library = native.library()
        assert library is not None
        self.library, self.words, self.alive = library, [], []

    def add(self, name: str, *arguments: object) -> None:
        self.words += [self.library.onward_program_instruction(name.encode()), len(arguments)]
        for argument in arguments:
            self.alive.append(argument)
            if isinstance(argument, Tensor):
                self.words.append(argument.data_ptr())
            elif isinstance(argument, int):
                self.words.append(argument)
            else:
                self.words.append(ctypes.addressof(argument))

    def run(self, times: int = 1) -> None:
        code, failed = torch.tensor(self.words, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        for _ in range(times):
            status = self.library.onward_program_run(code.data_ptr(), len(code), failed.data_ptr(), None)
            self.library.check(status, f"instruction at {failed.item()}")


def add_linear(program: Program, weights: list[Packed], x: Tensor) -> list[Tensor]:
    outs = [poisoned((x.shape[0], weight.rows), torch.float32) for weight in weights]
    products = (LinearArguments * len(weights))(
        *(
            LinearArguments(n=w.rows, packed=w.data.data_ptr(), out=out.data_ptr(), out_stride=w.rows)
            for w, out in zip(weights, outs, strict=True)
        )
    )
    program.alive += [outs, x]
    fmt = weights[0].format
    program.add("onward_linear_many", products, len(weights), fmt, *x.shape, x, F32, x.stride(0))
    return outs


def add_attention(program: Program, q: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, window: int) -> Tensor:
    out = poisoned(q.shape, q.dtype)
    batch, heads, queries, dim = q.shape
    arguments = AttentionArguments(
        batch=batch, heads=heads, kv_heads=keys.shape[1], queries=queries, positions=keys.shape[2],
        dim=dim, value_dim=dim,
        q=q.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), out=out.data_ptr(), q_strides=strides(q, 3),
        keys_strides=strides(keys, 3), values_strides=strides(values, 3), out_strides=strides(out, 3),
        offsets=offsets.data_ptr(), window=window, scale=dim**-0.5, dtype=F32,
    )  # fmt: skip
    program.alive += [out, q, keys, values, offsets]
    program.add("onward_attention", arguments)
    return out


@given(
    fmt=st.sampled_from(Format), t=st.sampled_from((1, 2, 7)),

    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    batch=st.integers(1, 2), offset=st.sampled_from((0, 31, 300)), window=st.sampled_from((0, 5)),
    threads=st.integers(1, 4), seed=st.integers(0, 2**31),
)  # fmt: skip
@per_isa
def test_a_program_has_the_bits_of_its_calls(
    isa: str, fmt: Format, t: int, sizes: list[int], batch: int, offset: int, window: int, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = [Packed.random(fmt, n, 96, generator) for n in sizes]
    second = Packed.random(fmt, 700, sizes[0], generator)
    x = torch.randn(t, 96, generator=generator)
    q = torch.randn(batch, 4, t, 32, generator=generator)
    keys, values = (torch.randn(batch, 2, offset + t + 3, 32, generator=generator) for _ in range(2))
    offsets = torch.tensor([offset, 2][:batch], dtype=torch.int32)
    native.set_num_threads(threads)
    program = Program()
    between = add_linear(program, first, x)
    mixed = add_attention(program, q, keys, values, offsets, window)
    (last,) = add_linear(program, [second], between[0])
    program.run(times=3)
    native.set_num_threads(1)
    for weight, out in zip(first, between, strict=True):
        assert torch.equal(out, weight.linear(x))
    assert torch.equal(mixed, attention(q, keys, values, offsets, window=window))
    assert torch.equal(last, second.linear(between[0]))


def test_a_program_ends_at_the_failing_instruction(isa: str) -> None:
    weight = Packed.random(Format.BF16, 500, 64, torch.Generator().manual_seed(0))
    x, program = torch.randn(1, 64), Program()
    (before,) = add_linear(program, [weight], x)
    at = len(program.words)
    program.add("onward_linear_many", (LinearArguments * 1)(LinearArguments(n=-1)), 1, 1, 1, 64, x, F32, 64)
    (after,) = add_linear(program, [weight], x)
    with pytest.raises(NativeError, match=f"instruction at {at} failed: bad argument"):
        program.run()
    assert torch.equal(before, weight.linear(x))
    assert after.isnan().all()


def test_a_program_ends_at_a_truncated_instruction(isa: str) -> None:
    weight = Packed.random(Format.BF16, 500, 64, torch.Generator().manual_seed(0))
    x, program = torch.randn(1, 64), Program()
    (before,) = add_linear(program, [weight], x)
    at = len(program.words)
    add_linear(program, [weight], x)
    del program.words[-1]
    with pytest.raises(NativeError, match=f"instruction at {at} failed: bad argument"):
        program.run()
    assert torch.equal(before, weight.linear(x))


def test_workers_sleep_after_a_program(isa: str) -> None:
    native.set_num_threads(1)
    others = set(Path("/proc/self/task").iterdir())
    native.set_num_threads(2)
    weight, program = Packed.random(Format.INT8, 4000, 256, torch.Generator().manual_seed(0)), Program()
    add_linear(program, [weight], torch.randn(1, 256))
    program.run(times=5)
    workers = set(Path("/proc/self/task").iterdir()) - others
    assert workers
    for _ in range(1000):  # the team spins for 50 us; a busy machine may need long to let it
        states = [(worker / "stat").read_text().rpartition(")")[2].split()[0] for worker in workers]
        if all(state == "S" for state in states):
            return
        time.sleep(0.005)
    pytest.fail(f"workers are {states}")
