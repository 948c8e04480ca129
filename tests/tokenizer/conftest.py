import pytest

from tiny_checkpoint import make_checkpoint


@pytest.fixture
def folder(tmp_path):
    """A whole small checkpoint, to be spoilt by the test."""
    return make_checkpoint(tmp_path / "tiny")
