"""`onward.load("owner/name")` against a local hub.

huggingface_hub reads its environment once, when it is imported. Most tests here set the constants it read, so that
they run in this process; those at the end set the environment itself, as users do, and start a process each.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from gguf_files import write_model
from hub_server import Hub
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, close_session
from safetensors.torch import load_file, save_file

import onward
from onward.checkpoint import find_folder
from onward.errors import CheckpointError, SourceError
from tiny_checkpoint import change_json, make_checkpoint, read_json, refused, split_into_shards, write_json

REPO = "someone/tiny"


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def cache(hub, tmp_path, monkeypatch):
    """The hub client, pointed at the local hub and at an empty cache."""
    home = tmp_path / "home"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "AGENT_HARNESSES_PATH": str(home / "harnesses.json"),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value, raising=False)
    # The client waits between attempts: a second in a download, up to eight before one.
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    close_session()
    yield home / "hub"
    close_session()


@pytest.fixture
def offline(monkeypatch):
    """Call it to go offline."""

    def go_offline():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        close_session()

    yield go_offline
    monkeypatch.undo()
    close_session()


@pytest.fixture
def published(hub, cache, folder):
    """The small checkpoint, on the hub as `REPO`."""
    hub.publish(REPO, folder)
    return folder


def same_weights(one: onward.LanguageModel, other: onward.LanguageModel) -> bool:
    return torch.equal(one.logits([5, 6, 7]), other.logits([5, 6, 7]))


# ── downloads and their sources ───────────────────────────────────────────────────────────────────────────


def test_a_hub_id_equals_its_folder(published):
    from_hub, from_folder = onward.load(REPO), onward.load(published)
    assert same_weights(from_hub, from_folder)
    assert from_hub.encode("hello") == from_folder.encode("hello")


def test_a_second_load_downloads_nothing(published, hub):
    onward.load(REPO)
    hub.requests.clear()
    onward.load(REPO)
    assert hub.sent() == set()


def test_a_second_load_works_offline(published, hub, offline):
    online = onward.load(REPO)
    hub.requests.clear()
    offline()
    assert same_weights(onward.load(REPO), online)
    assert hub.requests == []


def test_a_second_load_works_while_the_hub_is_down(published, hub):
    online = onward.load(REPO)
    hub.down_with = 503
    assert same_weights(onward.load(REPO), online)


def test_only_needed_files_are_downloaded(hub, cache, folder):
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    write_json(folder / "generation_config.json", {})
    (folder / "original").mkdir()
    for other in (
        "README.md",
        "consolidated.safetensors",
        "model-00001-of-00001.safetensors",
        "model.gguf",
        "model.onnx",
        "original/model.safetensors",
        "original/params.json",
        "pytorch_model.bin",
        "tokenizer.model",
    ):
        (folder / other).write_bytes(b"not for us: " + other.encode())
    hub.publish(REPO, folder)
    onward.load(REPO)
    assert hub.sent() == expected


@pytest.mark.parametrize(
    "names",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("first.safetensors", "second part.safetensors"),
        ("weights/a.safetensors", "weights/b.safetensors"),
        ("model[1].safetensors", "model[2].safetensors"),
    ],
)
def test_shards_are_downloaded_by_the_names_in_the_index(names, hub, cache, folder):
    whole = onward.load(folder)
    split_into_shards(folder, names)
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"left from an older version")
    hub.publish(REPO, folder)
    assert same_weights(onward.load(REPO), whole)
    assert {file for file in hub.sent() if file.endswith(".safetensors")} == set(names)


def test_shards_come_from_the_commit_of_their_index(hub, cache, folder, monkeypatch):
    split_into_shards(folder)
    whole = onward.load(folder)
    hub.publish(REPO, folder)
    inner, calls = huggingface_hub.snapshot_download, []

    def publish_a_new_version_in_between(*args, **options):
        path = inner(*args, **options)
        if not calls:
            other = make_checkpoint(folder.parent / "other", num_hidden_layers=1)
            split_into_shards(other)
            hub.publish(REPO, other)
        calls.append(path)
        return path

    monkeypatch.setattr("huggingface_hub.snapshot_download", publish_a_new_version_in_between)
    assert same_weights(onward.load(REPO), whole)
    assert len(calls) == 2


def test_a_single_file_is_preferred_to_shards(hub, cache, folder):
    whole = onward.load(folder)
    one_file = (folder / "model.safetensors").read_bytes()
    split_into_shards(folder)
    (folder / "model.safetensors").write_bytes(one_file)
    hub.publish(REPO, folder)
    assert same_weights(onward.load(REPO), whole)
    assert {file for file in hub.sent() if file.endswith(".safetensors")} == {"model.safetensors"}


@pytest.mark.parametrize("revision", ["v2", "refs/pr/1"])
def test_a_revision_after_an_at_sign_is_loaded(revision, published, hub, tmp_path):
    other = make_checkpoint(tmp_path / "other", num_hidden_layers=1)
    commit = hub.publish(REPO, other, revision)
    assert same_weights(onward.load(f"{REPO}@{revision}"), onward.load(other))
    assert same_weights(onward.load(f"{REPO}@{commit}"), onward.load(other))
    assert same_weights(onward.load(REPO), onward.load(published))


def test_a_local_folder_takes_precedence_over_the_hub(published, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = make_checkpoint(tmp_path / REPO, num_hidden_layers=1)
    assert same_weights(onward.load(REPO), onward.load(local))
    assert hub.requests == []


def test_a_path_is_never_a_hub_id(published, hub):
    with refused(SourceError, "no folder", REPO):
        onward.load(Path(REPO))
    assert hub.requests == []


def test_the_token_of_the_environment_opens_a_private_repository(published, hub, monkeypatch):
    hub.repositories[REPO].token = "hf_secret"
    with refused(SourceError, REPO, "HF_TOKEN"):
        onward.load(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    onward.load(REPO)
    assert {request.token for request in hub.requests if request.path.startswith("/storage/")} == {None}


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_repository(published):
    with refused(SourceError, "someone/else", "no hub repository", "HF_TOKEN"):
        onward.load("someone/else")


def test_invalid_token(published, hub, monkeypatch):
    hub.spent_tokens.add("hf_spent")
    monkeypatch.setenv("HF_TOKEN", "hf_spent")
    with refused(SourceError, REPO, "401", "check HF_TOKEN"):
        onward.load(REPO)


def test_gated_repository(published, hub, monkeypatch):
    hub.repositories[REPO].gated = True
    for token in (None, "hf_of_somebody_not_admitted"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with refused(SourceError, REPO, "gated", "HF_TOKEN"):
            onward.load(REPO)


def test_unknown_revision(published):
    with refused(SourceError, REPO, "no revision 'v9'"):
        onward.load(f"{REPO}@v9")


def test_an_at_sign_without_a_revision(published, hub):
    with refused(SourceError, "no revision", "@"):
        onward.load(f"{REPO}@")
    assert hub.requests == []


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_hub_that_refuses(status, published, hub):
    hub.down_with = status
    with refused(SourceError, REPO, str(status)):
        onward.load(REPO)


def test_an_unreachable_hub(hub, cache):
    hub.close()
    with refused(SourceError, REPO, "cannot be reached", "HF_ENDPOINT"):
        onward.load(REPO)
    hub.__init__()  # for the fixture to close


def test_offline_without_a_cached_copy(published, hub, offline):
    offline()
    with refused(SourceError, REPO, "HF_HUB_OFFLINE", "cache"):
        onward.load(REPO)
    assert hub.requests == []


@pytest.mark.parametrize(
    "source",
    [
        "",
        "./nowhere",
        "../nowhere",
        "/nowhere/at/all",
        "a/b/c",
        "a b/c",
        "x" * 300,
        "a\0b",
        "~no-such-user/x",
    ],
)
def test_neither_a_folder_nor_a_hub_id(source, hub, cache):
    with refused(SourceError, "no folder", "hub id"):
        onward.load(source)
    assert hub.requests == []


def test_names_without_an_owner_are_looked_up_on_the_hub(hub, cache):
    """As transformers does: gpt2 and bert-base-uncased are such names."""
    with refused(SourceError, "no folder and no hub repository 'nowhere'"):
        onward.load("nowhere")
    assert hub.requests


@pytest.mark.parametrize("source", ["a--b/c", "a/b.git", "a/b-"])
def test_ids_refused_by_the_hub_client(source, hub, cache):
    with refused(SourceError, source, "hub id"):
        onward.load(source)


def test_a_file_instead_of_its_folder(folder):
    with refused(SourceError, "is a file", "folder"):
        onward.load(folder / "config.json")


def test_a_repository_of_weights_in_another_format(hub, cache, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.publish(REPO, folder)
    with refused(SourceError, REPO, "pytorch_model.bin", "safetensors"):
        onward.load(REPO)
    assert "pytorch_model.bin" not in hub.sent()


def test_an_index_that_names_a_missing_shard(hub, cache, folder):
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.publish(REPO, folder)
    with refused(CheckpointError, "model-00002-of-00002.safetensors", "missing"):
        onward.load(REPO)


@pytest.mark.parametrize("shard", ["../../blobs/x", "/etc/passwd", "a/../../x", "", "..\\x"])
def test_an_index_that_points_outside_its_folder(shard, hub, cache, folder):
    split_into_shards(folder)
    index = folder / "model.safetensors.index.json"
    change_json(index, weight_map=read_json(index)["weight_map"] | {"model.norm.weight": shard})
    hub.publish(REPO, folder)
    with refused(CheckpointError, "outside its folder", repr(shard)):
        onward.load(REPO)


# ── downloads that end too early ──────────────────────────────────────────────────────────────────────────


def files_in(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("snapshots/*/*")}


def test_an_interrupted_download_is_resumed(published, hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # the received part of an incomplete piece is lost
    hub.cut("model.safetensors", at=[1000, 500])
    assert same_weights(onward.load(REPO), onward.load(published))
    ranges = [request.range for request in hub.requests if request.path.endswith("model.safetensors") and request.range]
    assert ranges == ["bytes=1000-", "bytes=1500-"]


def test_a_download_that_keeps_failing_leaves_no_partial_files(published, hub, cache, offline):
    hub.cut("model.safetensors", at=[1000] + [0] * 20)
    with refused(SourceError, REPO, "failed", "try again"):
        onward.load(REPO)
    assert "model.safetensors" not in files_in(cache)
    assert list(cache.rglob("*.incomplete")) == []

    hub.cut("model.safetensors", at=[])
    assert same_weights(onward.load(REPO), onward.load(published))


def test_a_partial_snapshot_is_not_used_offline(published, hub, cache, offline):
    hub.cut("model.safetensors", at=[1000] + [0] * 20)
    with refused(SourceError, "failed"):
        onward.load(REPO)
    assert files_in(cache)  # the small files arrived
    offline()
    with refused(SourceError, REPO, "not fully in the hub cache"):
        onward.load(REPO)


def test_missing_shards_are_an_error_offline(hub, cache, folder, offline):
    split_into_shards(folder)
    hub.publish(REPO, folder)
    hub.cut("model-00002-of-00002.safetensors", at=[1000] + [0] * 20)
    with refused(SourceError, "failed"):
        onward.load(REPO)
    offline()
    with refused(SourceError, REPO, "not fully in the hub cache"):
        onward.load(REPO)


def test_a_hub_that_dies_during_a_download(published, hub, monkeypatch):
    serve = hub._server.RequestHandlerClass._storage

    def die(handler, digest, file):
        hub.cut(file, at=[1000])
        serve(handler, digest, file)
        hub._server.socket.close()  # no server answers from now on

    monkeypatch.setattr(hub._server.RequestHandlerClass, "_storage", die)
    with refused(SourceError, REPO, "failed", "try again"):
        onward.load(REPO)


def test_a_new_version_is_downloaded_and_the_old_one_stays(published, hub, tmp_path):
    before = hub.repositories[REPO].revisions["main"]
    old = onward.load(REPO)
    tensors = load_file(published / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, published / "model.safetensors")
    hub.publish(REPO, published)
    assert not same_weights(onward.load(REPO), old)
    assert same_weights(onward.load(f"{REPO}@{before}"), old)


# ── the progress bar ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def bars_not_switched_off(monkeypatch):
    """transformers, used by other tests of this process, can switch the hub client's bars off for good."""
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "progress_bar_states", {})


@pytest.mark.usefixtures("bars_not_switched_off")
@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_on_request(progress, published, capsys):
    onward.load(REPO, progress=progress)
    shown = capsys.readouterr()
    assert bool(shown.err) == progress
    assert shown.out == ""


@pytest.mark.usefixtures("bars_not_switched_off")
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(terminal, published, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    onward.load(REPO)
    assert bool(capsys.readouterr().err) == terminal


@pytest.mark.parametrize("progress", [True, False])
def test_the_hub_clients_progress_setting_is_restored(progress, published):
    before = are_progress_bars_disabled()
    find_folder(REPO, progress=progress)
    assert are_progress_bars_disabled() == before


# ── the environment ───────────────────────────────────────────────────────────────────────────────────────


FIND = """
import sys
from onward.checkpoint import find_folder
from onward.errors import SourceError
for source in sys.argv[1:]:
    try:
        print(find_folder(source))
    except SourceError as error:
        print(error)
"""


def find_in_a_process(*sources: str, **environment: str) -> list[str]:
    """The result or error of `find_folder` for each source, in a process with this environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    command = [sys.executable, "-c", FIND, *sources]
    result = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_endpoint_home_and_offline_are_read_from_the_environment(hub, folder, tmp_path):
    hub.publish(REPO, folder)
    online = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    [fetched] = find_in_a_process(REPO, **online)
    assert Path(fetched).is_relative_to(tmp_path / "home")
    assert hub.sent() >= {"config.json", "model.safetensors"}

    hub.requests.clear()
    found, refusal = find_in_a_process(REPO, "someone/else", **online, HF_HUB_OFFLINE="1")
    assert found == fetched
    assert "HF_HUB_OFFLINE" in refusal
    assert hub.requests == []


# ── GGUF files ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gguf_file_of_a_repository(hub, cache, tmp_path):
    models = tmp_path / "models"
    (models / "q8").mkdir(parents=True)
    write_model(models / "whole.gguf", "qwen3", "Q8_0")
    write_model(models / "q8" / "m.gguf", "qwen3", "Q8_0", split_after=10)
    (models / "other.gguf").write_bytes(b"not asked for")
    hub.publish(REPO, models)
    expected = onward.load(models / "whole.gguf").logits([5, 6, 7])
    for name in ("whole.gguf", "q8/m-00001-of-00003.gguf", "q8/m-00002-of-00003.gguf"):
        assert torch.equal(onward.load(f"{REPO}:{name}").logits([5, 6, 7]), expected)
        assert torch.equal(onward.load(f"{REPO}@main:{name}").logits([5, 6, 7]), expected)
    assert "other.gguf" not in hub.sent()


def test_a_missing_gguf_file_is_named(hub, cache, tmp_path):
    (tmp_path / "m").mkdir()
    write_model(tmp_path / "m" / "whole.gguf", "qwen3", "Q8_0")
    hub.publish(REPO, tmp_path / "m")
    with refused(SourceError, "part.gguf", "whole.gguf"):
        onward.load(f"{REPO}:part.gguf")
    with refused(SourceError, f"{REPO}:whole.gguf"):
        onward.load(REPO)
    with refused(SourceError, "not a file inside"):
        onward.load(f"{REPO}:../whole.gguf")


def test_loading_a_local_model_does_not_import_the_hub_client():
    code = "import sys, onward; onward.load('demo'); print('huggingface_hub' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
