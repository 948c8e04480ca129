"""From the start of a process to its first byte of output, with a warm page cache.

    python -m benchmarks.start [--rounds 7] [--only TEXT …] [--old TREE]

The programs take turns; figures are medians, after a round that warms the page cache and writes files that are written
only once. Processor time is reported in addition to elapsed time, because it means more on a busy machine. `onward
generate` prints one token of the demo model, or of random weights in the shape of Qwen3-0.6B: from a folder in int8,
and from a folder in bf16, packed or quantized by each process, and from the copies that the first round stores. --old
runs each of them with another tree too, such as a worktree of an earlier commit. llama.cpp takes part if `make peers`
has installed it, through a worker that calls its C API. The interpreter, `import torch` and reading the weights of the
bf16 folder are the machine's limits in the same run. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.checkpoints import random_checkpoint
from benchmarks.compare.contenders import CONTENDERS, HOME
from benchmarks.compare.process import worker_command
from benchmarks.machine import description

PRINT = "import os; os.write(1, b'.'); os._exit(0)"  # without the end of the interpreter
READ = f"import sys; f = open(sys.argv[1], 'rb', 0); b = bytearray(8 << 20)\nwhile f.readinto(b): pass\n{PRINT}"
IDS = "1 2 3 4 5"
CAPACITY, CACHE = 4096, HOME / "start-cache"


def programs(old: Path | None) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Each program's command and the environment variables that it adds. old: another tree."""
    onward = [sys.executable, "-m", "onward"]
    in_bf16 = random_checkpoint()
    in_int8 = HOME / "start-int8"
    if not in_int8.exists():
        subprocess.run([*onward, "quantize", str(in_bf16), str(in_int8), "--format", "int8"], check=True)

    def generate(*prompt: str, model: Path | str) -> list[str]:
        return [*onward, "generate", "-m", str(model), "-n", "1", "-t", "0", *prompt]

    none, some = {"ONWARD_CACHE_DIR": ""}, {"ONWARD_CACHE_DIR": str(CACHE.absolute())}
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        "python": ([sys.executable, "-c", PRINT], none),
        "import torch": ([sys.executable, "-c", f"import torch; {PRINT}"], none),
        "weights read": ([sys.executable, "-c", READ, str(in_bf16 / "model.safetensors")], none),
    }
    own = {
        "onward --help": ([*onward, "--help"], none),
        "demo": (generate("Once upon a time", model="demo"), none),
        "int8 folder": (generate("--ids", IDS, model=in_int8), none),
        "int8 from a copy": (generate("--quantize", "int8", "--ids", IDS, model=in_bf16), some),
        "bf16 packed": (generate("--ids", IDS, model=in_bf16), none),
        "bf16 from a copy": (generate("--ids", IDS, model=in_bf16), some),
    }
    for name, (command, added) in own.items():
        found[name] = command, added
        if old is not None:
            path = os.pathsep.join([str(old.absolute() / "src"), os.environ.get("PYTHONPATH", "")])
            found[f"{name}, old"] = command, added | {"PYTHONPATH": path}
    for peer in CONTENDERS:
        if peer.name == "llama.cpp" and peer.precision in ("bf16", "int8") and not peer.variant and peer.installed:
            command = worker_command(peer.python, peer.worker, peer.model(), peer.precision, 2, CAPACITY)
            found[peer.label] = ([*command, "--once"], none)
    return found


def seconds(command: list[str], added: dict[str, str]) -> tuple[float, float]:
    """Seconds until the first byte, and the processor seconds of all threads until then. The program then runs to its
    end, and writes the files that the next start reads."""
    # With the compiled modules that an installation has.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | added
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        arrived = time.perf_counter()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        _, errors = process.communicate()
    assert first, f"{' '.join(command)}: {errors.decode()}"
    ticks = int(fields[11]) + int(fields[12])  # user and system
    return arrived - began, ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each program is started")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="programs whose name contains one of these texts")
    parser.add_argument("--old", type=Path, metavar="TREE", help="another tree of Onward, which takes part too")
    arguments = parser.parse_args()
    chosen = {
        name: program
        for name, program in programs(arguments.old).items()
        if arguments.only is None or any(text in name for text in arguments.only)
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for turn in range(arguments.rounds + 1):
        for name, program in chosen.items():
            value = seconds(*program)
            print(f"{turn} {name}: {value[0]:.2f} s, {value[1]:.2f} s of processors", file=sys.stderr)
            if turn:
                taken[name].append(value)
    print("seconds from process start to the first byte: median (least to most), and processor seconds")
    medians = {}
    for name, values in taken.items():
        wall, processors = zip(*values, strict=True)
        medians[name] = [round(statistics.median(each), 3) for each in (wall, processors)]
        print(f"{name:<28}{medians[name][0]:6.2f}  ({min(wall):.2f} to {max(wall):.2f}){medians[name][1]:8.2f}")
    print(json.dumps({"machine": description(), "rounds": arguments.rounds, "seconds": medians}))


if __name__ == "__main__":
    main()
