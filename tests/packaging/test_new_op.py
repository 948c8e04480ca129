"""The example of native/README.md, an op with a kernel: its two files and two lines work in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_environment import ROOT, plain_environment

README = ROOT / "native" / "README.md"
# Where an environment's own tools are, CMake and Ninja among them, which need not be on PATH.
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
CMAKE = shutil.which("cmake", path=PATH)
COMPILER = next(filter(None, (shutil.which(each) for each in (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)

# Runs in a process of its own, on the copy.
USE = """
import math
from pathlib import Path

import torch
from torch.nn import functional as F

import onward
from onward import native, ops

tree = Path.cwd()
assert Path(onward.__file__).is_relative_to(tree), onward.__file__
assert ops.choice() == ("native", "portable")

library, calls = native.library(), 0
kernel = library.onward_relu2

def counted(*arguments):
    global calls
    calls += 1
    return kernel(*arguments)

library.onward_relu2 = counted

def definition(x):
    return F.relu(x).square()

torch.manual_seed(0)
x = torch.randn(2, 5, 70)
x[0, 0, :4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])

# Eagerly: the bits of the definition, from one call of the kernel.
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    y = x.to(dtype)
    for each in (y, y[:, :, 3:36], y[:, 1:], y.transpose(1, 2), y[:0]):
        calls = 0
        assert torch.equal(ops.relu2(each), definition(each)), (dtype, each.shape)
        assert calls == 1
assert ops.relu2(torch.tensor([math.nan])).isnan().all()

# A dtype without a kernel: torch runs the definition.
calls = 0
assert torch.equal(ops.relu2(x.double()), definition(x.double()))
assert calls == 0
try:
    ops.relu2(torch.ones(3, dtype=torch.int32))
except onward.OnwardError as error:
    assert "relu2: x must be a float tensor" in str(error)
else:
    raise AssertionError("integers are accepted")

# The gradient is that of the definition.
leaf = x[1].clone().requires_grad_()
ops.relu2(leaf).sum().backward()
assert torch.equal(leaf.grad, 2 * F.relu(x[1]))
assert torch.autograd.gradcheck(ops.relu2, x[1, :2, :5].double().requires_grad_())
assert torch.equal(torch.func.vmap(ops.relu2)(x), definition(x))

# In a program: a kernel call, with the bits of the eager call.
params = {"table": torch.randn(11, 32), "head": ops.pack(torch.randn(11, 32))}
cache = torch.zeros(2, 1)

def forward(tokens, offsets, cache, params):
    return ops.linear(ops.relu2(ops.embedding(tokens, params["table"])), params["head"]), cache

program = onward.compile(forward, params=params, cache=cache, batch=2, tokens=3, backend="native", fallback="raise")
assert program.backend == "native"
report = program.explain(cache, batch=2, tokens=3)
assert list(report.missing) == []
assert [(row.kernel, row.calls) for row in report.rows if row.op == "relu2"] == [("relu2", 1)]
for shape in ((2, 3), (1, 1), (2, 7)):
    tokens = torch.randint(11, shape, dtype=torch.int32)
    offsets = torch.zeros(shape[0], dtype=torch.int32)
    got, want = (run(tokens, offsets, cache[: shape[0]], *rest)[0] for run, *rest in ((program,), (forward, params)))
    assert torch.equal(got, want), shape

# A dtype without a kernel, in a program: torch runs it, and the report says why.
def doubled(tokens, offsets, cache, params):
    x = ops.embedding(tokens, params["table"]).double()
    return ops.linear(ops.relu2(x).float(), params["head"]), cache

program = onward.compile(doubled, params=params, cache=cache, batch=2, tokens=3, backend="native")
[missing] = program.explain(cache, batch=2, tokens=3).missing
assert (missing.op, missing.why) == ("onward.relu2", "dtype torch.float64")
tokens, offsets = torch.randint(11, (2, 3), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
assert torch.equal(program(tokens, offsets, cache)[0], doubled(tokens, offsets, cache, params)[0])
print("it works")
"""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    result = subprocess.run(
        command, cwd=folder, env=plain_environment() | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


def example() -> dict[str, str]:
    """The blocks of the section of the README by the paths that the text in front of them names; "" for the line of
    `__all__`."""
    text = README.read_text(encoding="utf-8")
    section = text[text.index("## Add an op with a kernel") :]
    section = section[: section.index("\n## ")]
    cpp, module, line, entry = re.findall(r"^```(?:cpp|python)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    source, op, package = re.findall(r"`((?:native/src|src/onward/ops)/\w+\.\w+)`", section)[:3]
    assert package == "src/onward/ops/__init__.py"
    assert line.count("\n") == entry.count("\n") == 1, "one line each"
    return {source: cpp, op: module, package: line, "": entry}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is on PATH")
@pytest.mark.skipif(CMAKE is None, reason="CMake is neither in this environment nor on PATH")
def test_the_example_in_the_readme_is_a_complete_op(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "demo", "lib")
    shutil.copytree(ROOT / "src" / "onward", tmp_path / "src" / "onward", ignore=ignored)
    shutil.copytree(ROOT / "native", tmp_path / "native", ignore=ignored)
    assert CMAKE
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=PATH) else []
    # Without optimization the compiler takes an eighth of the time.
    run(CMAKE, "-S", "native", "-B", "build", "-DONWARD_OPTIMIZATION=-O0", *generator, folder=tmp_path, PATH=PATH)
    build = (CMAKE, "--build", "build", "--target", "onward_portable", "--parallel", str(os.cpu_count()))
    run(*build, folder=tmp_path, PATH=PATH)

    blocks = example()
    entry = blocks.pop("")
    for name, text in blocks.items():
        path = tmp_path / name
        if path.name == "__init__.py":
            package = path.read_text(encoding="utf-8")
            assert package.count("\n\n__all__ = [\n") == 1
            path.write_text(package.replace("\n\n__all__ = [\n", f"\n{text}\n__all__ = [\n{entry}"), encoding="utf-8")
        else:
            assert not path.exists()
            path.write_text(text, encoding="utf-8")
    output = run(*build, folder=tmp_path, PATH=PATH)  # which finds the new file by itself
    assert re.findall(r"Building CXX object \S*/src/(\S+)\.cpp\.o", output) == ["relu2"]

    lent = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    path = os.pathsep.join((str(tmp_path / "src"), *lent))
    # -S: no .pth file leads to the sources of an editable install.
    native = {"ONWARD_NATIVE_DIR": str(tmp_path / "build"), "ONWARD_ISA": "portable", "ONWARD_NUM_THREADS": "2"}
    assert run(sys.executable, "-S", "-c", USE, folder=tmp_path, PYTHONPATH=path, **native) == "it works\n"
