"""The main job of an installed Onward: `python main_job.py`, outside the clone, in the environment to test.

It imports nothing from the tests, so that it runs wherever a wheel was built. `--no-kernels` is for an install without
a compiler.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata, util
from pathlib import Path

import onward
from onward import native

PROMPT = "Once upon a time"
BIN = Path(sysconfig.get_path("scripts"))
PACKAGE = Path(onward.__file__).parent


def check_files() -> None:
    assert Path(sysconfig.get_path("purelib")) in PACKAGE.parents, f"not the installed package: {PACKAGE}"
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "demo" / "README.md").is_file()
    assert metadata.version("onward") == onward.__version__
    paths = [path.as_posix() for path in metadata.files("onward") or []]
    assert any(path.endswith("dist-info/licenses/LICENSE") for path in paths), paths
    assert {path.split("/")[0] for path in paths if not path.startswith("..")} == {
        "onward",
        f"onward-{onward.__version__}.dist-info",
    }, paths


def check_kernels(expected: bool) -> None:
    assert bool(native.built_isas()) == expected, native.built_isas()
    assert native.library_folder().parent == PACKAGE / "native"
    if expected:
        assert native.available_isas()


def check_texts() -> None:
    """Python, the script and the module give the same text, and streaming gives its pieces."""
    lm = onward.load("demo")
    completion = lm.generate(PROMPT, max_new_tokens=24, seed=1)
    assert isinstance(completion, onward.Completion)
    assert completion.text.startswith(",")
    assert "".join(piece.text for piece in lm.stream(PROMPT, max_new_tokens=24, seed=1)) == completion.text

    commands = [[str(BIN / "onward")]]
    if util.find_spec("onward.__main__"):
        commands.append([sys.executable, "-m", "onward"])
    for command in commands:
        assert shutil.which(command[0]), command
        options = [PROMPT, "--max-new-tokens", "24", "--seed", "1", "--json"]
        output = subprocess.run([*command, "generate", *options], stdout=subprocess.PIPE, check=True).stdout
        assert json.loads(output)["text"] == completion.text, command


if __name__ == "__main__":
    check_files()
    check_kernels("--no-kernels" not in sys.argv)
    check_texts()
    print(f"onward {onward.__version__} in {sys.prefix} works; kernels: {', '.join(native.built_isas()) or 'none'}")
