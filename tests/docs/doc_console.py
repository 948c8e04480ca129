"""The commands of a console block; Onward's commands run in this process."""

import glob
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from doc_pages import ROOT, agrees

from onward import ops
from onward.cli.main import run

# Commands that set up a machine are parsed but not run; `make` and `python` must name existing targets and files.
_NOT_RUN = {"git", "cd", "pip", "python3", "source", "sudo", "export", "hf"}
_NOT_RUN |= {"docker", "until"}
# Commands of the system that prepare a page's files.
_SYSTEM = {"chmod", "install", "openssl"}


# Where a page's server listens, as the page has it and as it is.
_ADDRESS = "http://localhost:8000"
_servers: list[tuple[subprocess.Popen[str], str]] = []


@contextmanager
def servers() -> Iterator[None]:
    """Ends the servers that a page has started."""
    try:
        yield
    finally:
        while _servers:
            process, _ = _servers.pop()
            process.kill()
            process.communicate()


def addressed(text: str) -> str:
    """A block with the address of the page's server."""
    return text.replace(_ADDRESS, _servers[-1][1]) if _servers else text


def _serve(arguments: list[str]) -> None:
    """Start a server for the page, on a free port."""
    # Only on this machine, regardless of the page.
    command = [sys.executable, "-m", "onward", "serve", *arguments, "--port", "0", "--host", "127.0.0.1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        if found := re.search(r'"serves", "url": "([^"]*)"', line):
            _servers.append((process, found[1]))
            return
        lines.append(line)
    process.communicate()
    raise AssertionError(f"the server has not begun: {''.join(lines)}")


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with the output that is printed below it ("" where none is)."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = re.sub(r"\\\n\s*", " ", part).partition("\n")
        yield command, output


def run_command(command: str, output: str, patch: pytest.MonkeyPatch) -> str:
    """Run a line and compare what it prints with `output`; returns what it printed.

    Where an error is printed below it, the command ends with it.
    """
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        patch.setenv(*words.pop(0).split("=", 1))
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "make":
        return _make(words[1:], output, patch)
    if words[0] == "python":
        _check_script(words[1:])
        return ""
    if words[:2] == ["onward", "serve"] and "--help" not in words:
        _serve(words[2:])
        return ""
    if words[:2] == ["onward", "deploy"] and "--help" not in words:  # tests/cluster runs deployments
        help_text = _run_onward(["deploy", "--help"], "", "", patch)
        assert all(word in help_text for word in words if word.startswith("--")), command
        return ""
    if words[0] == "curl":
        assert _servers, f"no server runs for: {command}"
        if shutil.which("curl"):
            done = subprocess.run([*words, "--fail", "--silent"], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert not output.strip() or agrees(done.stdout, output), done.stdout
        return ""
    if words[0] == "lm_eval":
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout
    if words[0] in _NOT_RUN:
        return ""
    if words[0] in _SYSTEM:
        words, file = (words[:-2], Path(words[-1])) if words[-2] == ">" else (words, None)
        words = [path for word in words for path in sorted(glob.glob(word)) or [word]]
        done = subprocess.run(words, capture_output=True, check=True, text=True)
        if file is not None:
            file.write_text(done.stdout, encoding="utf-8")
        return ""
    piped = ""
    if words[0] == "echo":
        if ">" in words:
            Path(words[words.index(">") + 1]).write_text(words[1] + "\n", encoding="utf-8")
            return ""
        assert words[2] == "|", command
        piped, words = words[1] + "\n", words[3:]
    for sign in ("<", ">"):
        if sign in words:
            at = words.index(sign)
            piped = Path(words[at + 1]).read_text(encoding="utf-8") if sign == "<" else piped
            words = words[:at] + words[at + 2 :]
    assert words[0] == "onward", f"no test knows how to run: {command}"
    if words[1] == "chat" and not piped:
        piped = "/exit\n"  # as on a terminal
    return _run_onward(words[1:], piped, output, patch)


def _make(targets: list[str], output: str, patch: pytest.MonkeyPatch) -> str:
    """A target must be there. `make demo` is run, for what its page prints: it is a command of ours."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target!r}"
    if not output.strip() or targets != ["demo"]:
        return ""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    (line,) = (line for line in recipe[1].splitlines() if "/onward " in line)
    arguments = shlex.split(line.strip().removeprefix("@"))[1:]
    return _run_onward(arguments, "", output, patch, before=arguments[1])


def _check_script(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        module = ROOT / arguments[1].replace(".", "/")
        known = arguments[1] in {"venv", "pip", "onward"} or module.is_dir() or module.with_suffix(".py").is_file()
        assert known, f"no module {arguments[1]!r}"
    elif not arguments[0].startswith("-"):
        assert (ROOT / arguments[0]).is_file() or Path(arguments[0]).is_file(), f"no script {arguments[0]!r}"


def _run_onward(arguments: list[str], piped: str, output: str, patch: pytest.MonkeyPatch, before: str = "") -> str:
    streams = [io.TextIOWrapper(io.BytesIO(content), encoding="utf-8") for content in (piped.encode(), b"", b"")]
    with patch.context() as inner:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            inner.setattr(f"sys.{name}", stream)
        inner.setenv("COLUMNS", "80")
        # A documentation's machine may have any number of processors.
        inner.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        code = run(arguments)
    printed, complaints = (_content(stream) for stream in streams[1:])
    if output.startswith("error: "):
        assert code == 2
        assert agrees(complaints, output), complaints
        return printed
    assert code == 0, complaints
    # Without the kernels the rounding is torch's own, and a sampled text may be another one.
    if output.strip() and ops.choice().form == "native":
        assert agrees(before + printed, output), before + printed
    return printed


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()
