"""Progress of loading: a callback for every layer, and a bar on a terminal if loading takes long."""

import importlib
import io
import time
from pathlib import Path

import pytest

import onward
from onward.language_model import weights as loading_weights


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_progress_function_is_called_for_every_layer(quantize: str | None) -> None:
    fractions: list[float] = []
    lm = onward.load("demo", quantize=quantize, progress=fractions.append)
    layers = len(lm.model.params.layers)
    assert fractions == [number / layers for number in range(1, layers + 1)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("delay_s", "progress", "shown"), [(0.0, None, True), (60.0, None, False), (0.0, False, False)]
)
def test_a_bar_is_shown_on_terminals_for_long_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, delay_s: float, progress: bool | None, shown: bool
) -> None:
    # Whoever turned the hub's bars off, as transformers does for some, turned this one off too.
    monkeypatch.setattr(importlib.import_module("huggingface_hub.utils.tqdm"), "progress_bar_states", {})
    folder = onward.testing.random_checkpoint(tmp_path)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(loading_weights, "_BAR_DELAY_S", delay_s)
    pack_layer = loading_weights.pack_params

    def slow(params, release):
        time.sleep(0.2)  # longer than tqdm's interval between two drawings
        return pack_layer(params, release=release)

    monkeypatch.setattr(loading_weights, "pack_params", slow)
    onward.load(folder, device="cpu", progress=progress)
    assert ("Loading weights" in screen.getvalue()) == shown


def test_a_pipe_gets_no_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = onward.testing.random_checkpoint(tmp_path)
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    monkeypatch.setattr(loading_weights, "_BAR_DELAY_S", 0.0)
    onward.load(folder)
    assert pipe.getvalue() == ""
