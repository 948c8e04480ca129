"""Fetch models and adapters from the hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from onward.checkpoint.formats import SETTINGS_FILES
from onward.checkpoint.gguf import parts_of
from onward.checkpoint.shards import INDEX, TEXT_FILES, WEIGHTS, lies_outside, weight_files
from onward.errors import OnwardError, SourceError, one_line

# The files of a checkpoint in the Hugging Face layout. Repositories often hold the same weights in other formats too;
# those are not fetched. Shards are fetched after the index, which names them.
_FILES = ("config.json", *SETTINGS_FILES, *TEXT_FILES, WEIGHTS, INDEX)
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack", ".onnx")


def download_gguf(repository: str, revision: str | None, file: str, progress: bool) -> Path:
    """A GGUF file of a repository, with the other parts where it is split."""
    with _as_source_errors(repository, revision):
        path = PurePosixPath(file)
        if lies_outside(file):
            raise SourceError(f"{file!r} is no file inside {repository}")
        files = [str(path.with_name(name)) for name in parts_of(path.name)]
        folder = _fetch(repository, revision, files, progress)
        if absent := [name for name in files if not (folder / name).is_file()]:
            there = [
                name for name in HfApi().list_repo_files(repository, revision=folder.name) if name.endswith(".gguf")
            ]
            has = f"; it has {', '.join(there[:4])}" if there else ""
            raise SourceError(f"{repository} has no {absent[0]}{has}")
        return folder / files[0]


def download(repository: str, revision: str | None, progress: bool) -> Path:
    """The folder of a model; the rest as `download_gguf`."""
    with _as_source_errors(repository, revision):
        folder = _fetch(repository, revision, _FILES, progress)
        if shards := weight_files(folder):
            # The folder has the name of the commit: the shards come from the same commit, even if the branch moves now.
            return folder if shards == [WEIGHTS] else _fetch(repository, folder.name, shards, progress)
        files = HfApi().list_repo_files(repository, revision=folder.name)
        others = [file for file in files if file.endswith(_OTHER_WEIGHTS)]
        gguf = [file for file in others if file.endswith(".gguf")]
        raise SourceError(
            f"{repository} holds no weights that can be read: neither {WEIGHTS} nor {INDEX}"
            + (f" (but {', '.join(others[:3])})" if others else "")
            + (f"; name the file: {repository}:{gguf[0]}" if gguf else "; choose a repository that has safetensors")
        )


def download_adapter(repository: str, revision: str | None, progress: bool) -> Path:
    """The folder of an adapter; the rest as `download_gguf`."""
    with _as_source_errors(repository, revision):
        return _fetch(repository, revision, ("adapter_config.json", "adapter_model.safetensors"), progress)


def _fetch(repository: str, revision: str | None, files: Sequence[str], progress: bool) -> Path:
    """The snapshot's folder with `files` in it, as far as the repository has them."""
    patterns = [escape(file) for file in files]
    bars = None if progress else _Silent
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, tqdm_class=bars))


class _Silent(tqdm):
    """The hub client's progress bar, disabled. Its own switch would disable the bars of the whole process for good."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]


@contextmanager
def _as_source_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub client into a `SourceError` that says what to do."""
    try:
        yield
    except OnwardError:
        raise
    except GatedRepoError as error:
        raise SourceError(
            f"{repository} is gated: accept its terms on the hub and set HF_TOKEN to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"no folder and no hub repository {repository!r}; if it is private, set HF_TOKEN to a token that reads it"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(
            f"{repository} has no revision {revision!r} on the hub; leave it out for the newest"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise SourceError(
            f"no folder {repository!r}; as a hub id it is not whole in the hub cache, and the hub {_why_not(error)}: "
            "go online once, or give a local folder"
        ) from error
    except HFValidationError as error:
        raise SourceError(f"{repository!r} is no folder and no valid hub id: {one_line(error)}") from error
    except HfHubHTTPError as error:
        advice = "check HF_TOKEN, or unset it" if error.response.status_code == 401 else "try again"
        raise SourceError(f"downloading {repository} failed: {one_line(error)}; {advice}") from error
    except Exception as error:  # the errors of its HTTP library, which differ from version to version
        raise SourceError(f"downloading {repository} failed: {one_line(error)}; try again") from error


def _why_not(error: BaseException) -> str:
    """Why the hub gave nothing, as the end of a sentence that begins with "the hub"."""
    cause = error.__cause__ or error
    if isinstance(cause, OfflineModeIsEnabled):
        return "may not be asked, for HF_HUB_OFFLINE is set"
    if isinstance(cause, HfHubHTTPError):
        return f"refused ({one_line(cause)})"
    return f"cannot be reached ({one_line(cause)}; HF_ENDPOINT and the network decide)"
