"""Names that can be hub ids, and the errors for those that can't."""

from pathlib import Path

import pytest

from onward.checkpoint import source
from onward.checkpoint.source import find_adapter, find_folder
from onward.errors import SourceError


@pytest.fixture
def asked(monkeypatch):
    """The requests to the hub, which is empty."""
    names = []

    def download(repository, revision, progress):
        names.append((repository, revision))
        raise SourceError(f"no folder and no hub repository {repository!r}")

    monkeypatch.setattr(source, "download", download)
    monkeypatch.setattr(source, "download_adapter", download)
    return names


@pytest.mark.parametrize(
    ("source", "repository", "revision"),
    [
        ("gpt2", "gpt2", None),
        ("bert-base-uncased", "bert-base-uncased", None),
        ("gpt2@main", "gpt2", "main"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("Qwen/Qwen3-0.6B@v1", "Qwen/Qwen3-0.6B", "v1"),
        ("owner/name.gguf", "owner/name.gguf", None),
    ],
)
def test_names_with_and_without_an_owner_are_hub_ids(asked, source, repository, revision):
    for find in (find_folder, find_adapter):
        with pytest.raises(SourceError, match=f"no hub repository '{repository}'"):
            find(source)
    assert asked == [(repository, revision)] * 2


@pytest.mark.parametrize("source", ["./gpt2", "/no/such/folder", "a b", "model.gguf", "model.safetensors", "a/b/c", ""])
def test_invalid_hub_ids_are_not_looked_up(asked, source):
    with pytest.raises(SourceError, match=r"no folder .*, and it cannot be a hub id; give a folder, a hub id such as"):
        find_folder(source)
    with pytest.raises(SourceError, match="no folder"):
        find_adapter(source)
    assert not asked


def test_a_path_is_never_a_hub_id(asked):
    with pytest.raises(SourceError, match=r"no folder 'gpt2'; give a folder, or a hub id such as .* as a str"):
        find_folder(Path("gpt2"))
    assert not asked


@pytest.mark.parametrize("source", ["demo-drafts", "demos", "demo_draft"])
def test_a_misspelled_bundled_model_is_suggested(asked, source):
    with pytest.raises(SourceError, match=r"; did you mean 'demo"):
        find_folder(source)
    with pytest.raises(SourceError) as raised:
        find_folder("gpt2")
    assert "mean" not in str(raised.value)
