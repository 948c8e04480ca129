"""Warnings of replicas, whose own output is invisible."""

from pathlib import Path

import pytest
from streams import STORY, deployed, read

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(240)


def test_the_command_shows_the_warnings_of_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_NATIVE_DIR", str(tmp_path))
    with deployed() as (port, log):
        assert log.count("warning: no native kernels") == log.count("warning") == 1
        assert read(port, STORY | {"max_tokens": 5}).is_whole
