"""The command line inside this process, with its own standard streams; and one demo model for all tests."""

import io

import pytest
from command_line import Cli, Result

import onward
from onward.cli.main import run


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """cli("generate", "Once", input="…") -> Result; like a pipe at every end."""

    def call(*arguments: str, input: str | bytes = "") -> Result:
        data = input.encode() if isinstance(input, str) else input
        streams = [io.TextIOWrapper(io.BytesIO(content), encoding="utf-8") for content in (data, b"", b"")]
        with monkeypatch.context() as patch:
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(f"sys.{name}", stream)
            code = run(arguments)
        out, err = (_content(stream) for stream in streams[1:])
        return Result(code, out, err)

    return call


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


@pytest.fixture(scope="session")
def lm() -> onward.LanguageModel:
    return onward.load("demo")


@pytest.fixture
def loaded(lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> onward.LanguageModel:
    """The demo model, which the commands then find loaded."""
    monkeypatch.setattr("onward.cli.batch.load_model", lambda flags, drafting, adapting: lm)
    monkeypatch.setattr("onward.cli.chat.load_model", lambda flags, drafting, adapting: lm)
    monkeypatch.setattr("onward.cli.generate.load_model", lambda flags, drafting, adapting: lm)
    return lm
