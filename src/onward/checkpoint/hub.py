"""Download models and adapters from the hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, errors, snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from onward.checkpoint.formats import SETTINGS_FILES
from onward.checkpoint.gguf import parts_of
from onward.checkpoint.shards import INDEX, TEXT_FILES, WEIGHTS, lies_outside, weight_files
from onward.errors import OnwardError, SourceError, one_line

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
            files = HfApi().list_repo_files(repository, revision=folder.name)
            present = [name for name in files if name.endswith(".gguf")]
            hint = f"; it has {', '.join(present[:4])}" if present else ""
            raise SourceError(f"{repository} has no {absent[0]}{hint}")
        return folder / files[0]


def download(repository: str, revision: str | None, progress: bool) -> Path:
    with _as_source_errors(repository, revision):
        folder = _fetch(repository, revision, _FILES, progress)
        if shards := weight_files(folder):
            # The folder is named after the commit: the shards come from it even if the branch has moved.
            return folder if shards == [WEIGHTS] else _fetch(repository, folder.name, shards, progress)
        files = HfApi().list_repo_files(repository, revision=folder.name)
        others = [file for file in files if file.endswith(_OTHER_WEIGHTS)]
        gguf = [file for file in others if file.endswith(".gguf")]
        raise SourceError(
            f"{repository} has no weights in a supported format: neither {WEIGHTS} nor {INDEX}"
            + (f" (but {', '.join(others[:3])})" if others else "")
            + (f"; name the file: {repository}:{gguf[0]}" if gguf else "; choose a repository that has safetensors")
        )


def download_adapter(repository: str, revision: str | None, progress: bool) -> Path:
    with _as_source_errors(repository, revision):
        return _fetch(repository, revision, ("adapter_config.json", "adapter_model.safetensors"), progress)


def _fetch(repository: str, revision: str | None, files: Sequence[str], progress: bool) -> Path:
    """Download the `files` that the repository has, and return the snapshot's folder."""
    patterns = [escape(file) for file in files]
    bars = None if progress else _Silent
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, tqdm_class=bars))


class _Silent(tqdm):
    """The hub client's progress bar, disabled. The client's own switch disables bars for the whole process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]


@contextmanager
def _as_source_errors(repository: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except OnwardError:
        raise
    except Exception as error:  # the HTTP library's errors differ between versions
        raise SourceError(_message(error, repository, revision)) from error


def _message(error: Exception, repository: str, revision: str | None) -> str:
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms on the hub, and log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = "if it is private, log in with `hf auth login` or set HF_TOKEN"
        return f"no folder and no hub repository {repository!r}; {advice}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r} on the hub; omit it for the latest"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return (
            f"no folder {repository!r}, and the hub repository of that name is not fully in the hub cache "
            f"and cannot be downloaded: {_hub_failure(error)}"
        )
    if isinstance(error, errors.HFValidationError):
        return f"no folder {repository!r}, and not a valid hub id: {one_line(error)}"
    unauthorized = isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401
    advice = "check HF_TOKEN, or unset it" if unauthorized else "try again"
    return f"downloading {repository} failed: {one_line(error)}; {advice}"


def _hub_failure(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it, or use a local folder"
    if isinstance(cause, errors.HfHubHTTPError):
        return f"the hub refused ({one_line(cause)})"
    return f"the hub cannot be reached ({one_line(cause)}); check the network and HF_ENDPOINT, or use a local folder"
