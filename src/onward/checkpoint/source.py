"""Resolve a model source: bundled, local, or downloaded from the hub. The hub client is imported on first use."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.formats import SETTINGS_FILES
from onward.checkpoint.gguf import GgufCheckpoint, is_gguf, parts_of
from onward.checkpoint.shards import INDEX, TEXT_FILES, WEIGHTS, lies_outside, weight_files
from onward.errors import OnwardError, RequestError, SourceError, one_line

Checkpoint = CheckpointFolder | GgufCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a path that `find_folder` returned: a GGUF file, or a folder in the Hugging Face layout."""
    return GgufCheckpoint(path) if is_gguf(path) else CheckpointFolder(path)


BUNDLED = {"demo": "target", "demo-draft": "draft", "demo-head": "head"}
# The hub's format: owner/name, or only the name of an old model such as gpt2.
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_GGUF_ON_HUB = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^:]+))?:(?P<file>.+\.gguf)", re.ASCII)


def find_folder(source: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Return `source` as a local folder or GGUF file, downloading it first if it is on the hub.

    "demo", "demo-draft" and "demo-head" come with the package (use "./demo" for a folder of that name). An existing
    folder takes precedence over a hub id; one with a single GGUF model and no config.json resolves to that model. A
    hub id is `owner/name`, or `name` for a model without an owner such as gpt2, optionally followed by `@revision`;
    `owner/name:file.gguf` is a GGUF file on the hub. The hub client's own settings apply: HF_ENDPOINT, HF_HOME,
    HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS.

    Args:
        source: a path or hub id. An `os.PathLike` is always local.
        progress: show progress bars while downloading.

    Raises:
        SourceError: no such folder, no such repository, one without safetensors, or the hub cannot be reached.
        CheckpointError: the repository's index of shards cannot be read.
        RequestError: the source is neither.
    """
    source = checked_source(source)
    name = str(source)
    if name in BUNDLED and isinstance(source, str):
        return Path(__file__).parent.parent / "demo" / BUNDLED[name]
    folder = os.path.expanduser(source)
    if os.path.isdir(folder) and name:
        return _gguf_inside(Path(folder)) or Path(folder)
    if os.path.exists(folder) and name:
        if is_gguf(Path(folder)):
            return Path(folder)
        raise SourceError(f"{name} is a file, but not a GGUF file; give the folder with config.json and the weights")
    if not isinstance(source, Path) and (match := _GGUF_ON_HUB.fullmatch(name)):
        return download_gguf(match["repository"], match["revision"], match["file"], progress)
    repository, separator, revision = name.partition("@")
    if isinstance(source, Path):
        raise SourceError(f"no folder {name!r}; give a folder, or a hub id such as 'Qwen/Qwen3-0.6B' as a str")
    if not _is_hub_id(repository):
        raise SourceError(
            f"no folder {name!r}, and it cannot be a hub id; give a folder, a hub id such as 'Qwen/Qwen3-0.6B', or "
            f"'demo'{_did_you_mean(name)}"
        )
    if separator and not revision:
        raise SourceError(f"no revision after the '@' in {name!r}; write {repository}@revision, or {repository}")
    try:
        return download(repository, revision or None, progress)
    except SourceError as error:
        raise SourceError(f"{error}{_did_you_mean(name)}") from error


def checked_source(source: object) -> str | Path:
    if isinstance(source, str | os.PathLike):
        return source if isinstance(source, str) else Path(source)
    raise RequestError(f"a source must be a folder, a hub id or 'demo'; got {source!r}")


def _is_hub_id(repository: str) -> bool:
    """Whether this can be a hub id. Without an owner, the name of a weight file is not one."""
    return bool(_HUB_ID.fullmatch(repository)) and ("/" in repository or not repository.endswith(_WEIGHT_SUFFIXES))


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name, BUNDLED, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def _gguf_inside(folder: Path) -> Path | None:
    if (folder / "config.json").is_file():
        return None
    firsts = sorted({parts_of(file.name)[0] for file in folder.glob("*.gguf") if file.is_file()})
    if len(firsts) > 1:
        raise SourceError(f"{folder} has {len(firsts)} GGUF models ({', '.join(firsts[:4])}): give the path of one")
    return folder / firsts[0] if firsts else None


def find_adapter(source: str | os.PathLike[str], *, progress: bool = False) -> Path:
    """Return the folder of an adapter: a local folder, or a hub id, optionally with "@revision".

    Raises:
        SourceError: no such folder or repository.
    """
    source = checked_source(source)
    folder = os.path.expanduser(source)
    if os.path.isdir(folder) and str(source):
        return Path(folder)
    repository, _, revision = str(source).partition("@")
    if isinstance(source, Path) or not _is_hub_id(repository):
        raise SourceError(f"no folder {str(source)!r}: give a folder that peft wrote, or the hub id of an adapter")
    return download_adapter(repository, revision or None, progress)


# The files to download, without weights in other formats. Shards follow after the index that lists them.
_FILES = ("config.json", *SETTINGS_FILES, *TEXT_FILES, WEIGHTS, INDEX)
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack", ".onnx")


def download_gguf(repository: str, revision: str | None, file: str, progress: bool) -> Path:
    """Download a GGUF file, with all its parts if it is split."""
    with _as_source_errors(repository, revision):
        path = PurePosixPath(file)
        if lies_outside(file):
            raise SourceError(f"{file!r} is not a file inside {repository}")
        files = [str(path.with_name(name)) for name in parts_of(path.name)]
        folder = _fetch(repository, revision, files, progress)
        if absent := [name for name in files if not (folder / name).is_file()]:
            present = [name for name in _listed(repository, folder) if name.endswith(".gguf")]
            hint = f"; it has {', '.join(present[:4])}" if present else ""
            raise SourceError(f"{repository} has no {absent[0]}{hint}")
        return folder / files[0]


def download(repository: str, revision: str | None, progress: bool) -> Path:
    with _as_source_errors(repository, revision):
        folder = _fetch(repository, revision, _FILES, progress)
        if shards := weight_files(folder):
            # The folder is named after the commit: the shards come from it even if the branch has moved.
            return folder if shards == [WEIGHTS] else _fetch(repository, folder.name, shards, progress)
        others = [file for file in _listed(repository, folder) if file.endswith(_OTHER_WEIGHTS)]
        gguf = [file for file in others if file.endswith(".gguf")]
        raise SourceError(
            f"{repository} has no weights in a supported format: neither {WEIGHTS} nor {INDEX}"
            + (f" (but {', '.join(others[:3])})" if others else "")
            + (f"; name the file: {repository}:{gguf[0]}" if gguf else "; choose a repository that has safetensors")
        )


def download_adapter(repository: str, revision: str | None, progress: bool) -> Path:
    with _as_source_errors(repository, revision):
        return _fetch(repository, revision, ("adapter_config.json", "adapter_model.safetensors"), progress)


def _listed(repository: str, snapshot: Path) -> list[str]:
    """The files of the repository at the commit of a snapshot's folder."""
    from huggingface_hub import HfApi

    return HfApi().list_repo_files(repository, revision=snapshot.name)


def _fetch(repository: str, revision: str | None, files: Sequence[str], progress: bool) -> Path:
    """Download the `files` that the repository has, and return the snapshot's folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        """A disabled progress bar. The client's own switch disables bars for the whole process."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]

    patterns, bars = [escape(file) for file in files], None if progress else Silent
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, tqdm_class=bars))


@contextmanager
def _as_source_errors(repository: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except OnwardError:
        raise
    except Exception as error:  # the HTTP library's errors differ between versions
        raise SourceError(_message(error, repository, revision)) from error


def _message(error: Exception, repository: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms on the hub, and log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = "if it is private, log in with `hf auth login` or set HF_TOKEN"
        return f"no folder and no hub repository {repository!r}; {advice}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r} on the hub; omit it for the latest"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        cause = error.__cause__ or error
        failure = (
            f"the hub cannot be reached ({one_line(cause)}); check the network and HF_ENDPOINT, or use a local folder"
        )
        if isinstance(cause, errors.OfflineModeIsEnabled):
            failure = "HF_HUB_OFFLINE is set; unset it, or use a local folder"
        elif isinstance(cause, errors.HfHubHTTPError):
            failure = f"the hub refused ({one_line(cause)})"
        return (
            f"no folder {repository!r}, and the hub repository of that name is not fully in the hub cache "
            f"and cannot be downloaded: {failure}"
        )
    if isinstance(error, errors.HFValidationError):
        return f"no folder {repository!r}, and not a valid hub id: {one_line(error)}"
    unauthorized = isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401
    advice = "check HF_TOKEN, or unset it" if unauthorized else "try again"
    return f"downloading {repository} failed: {one_line(error)}; {advice}"
