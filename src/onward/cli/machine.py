"""What a machine has that decoding cares for."""

import os
import platform

from onward import __version__
from onward.cli.facts import Fact
from onward.reprs import in_bytes

# Instructions that kernels for low precision are written with, as /proc/cpuinfo calls them.
_INSTRUCTIONS = [
    *["avx2", "fma", "f16c", "avx_vnni"],
    *["avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"],
    *["amx_tile", "amx_int8", "amx_bf16"],
    *["asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"],
]


def machine_facts() -> list[Fact]:
    """The processor and its memory."""
    from onward.native.machine_memory import machine_memory, system_fields

    cpuinfo = system_fields("/proc/cpuinfo")
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    total, available = machine_memory()
    return [
        Fact("processor", cpuinfo.get("model name") or platform.processor() or platform.machine()),
        Fact("cores", usable_cores(), f"{usable_cores()} of {os.cpu_count()} usable"),
        Fact("instructions", [name for name in _INSTRUCTIONS if name in flags], None if flags else "unknown"),
        Fact("memory_bytes", total, _size(total)),
        Fact("free_memory_bytes", available, _size(available)),
        Fact("system", f"{platform.system()} {platform.release()}"),
    ]


def kernel_facts() -> list[Fact]:
    """Which form of the ops runs on the CPU."""
    from onward import native, ops

    built = native.built_isas()
    if not built:
        form = "torch's operators: no native library was built (install again where there is a C++ compiler)"
        return [Fact("form", "definition", form)]
    choice = ops.choice()
    return [
        Fact("form", choice.form, None if choice.form == "native" else "torch's operators, as ONWARD_OPS or _ISA asks"),
        Fact("instruction_set", choice.isa),
        Fact("built", built),
        Fact("usable", native.available_isas()),
        Fact("threads", native.num_threads(), f"{native.num_threads()} ({native.threads_wanted()[1]})"),
    ]


def software_facts() -> list[Fact]:
    """What Onward runs on here, with the devices that PyTorch finds."""
    import torch

    devices = [_cuda_device(index) for index in range(torch.cuda.device_count())]
    return [
        Fact("onward", __version__),
        Fact("python", platform.python_version()),
        Fact("torch", torch.__version__),
        Fact("torch_threads", torch.get_num_threads()),
        Fact("torch_vectors", torch.backends.cpu.get_cpu_capability()),
        Fact("cuda_devices", devices),
    ]


def _cuda_device(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name} ({in_bytes(properties.total_memory)})"


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _size(count: int | None) -> str:
    return "unknown" if count is None else in_bytes(count)
