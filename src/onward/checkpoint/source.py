"""Find a model's folder: in the package, on the disk, or on the hub."""

import os
import re
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

from onward.checkpoint.gguf import is_gguf, parts_of
from onward.checkpoint.shards import INDEX, WEIGHTS, lies_outside, weight_files
from onward.errors import OnwardError, SourceError, one_line

BUNDLED = {"demo": "target", "demo-draft": "draft"}
# The files of a checkpoint in the Hugging Face layout. Repositories often hold the same weights in other formats too;
# those are not fetched. Shards are fetched after the index, which names them.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    WEIGHTS,
    INDEX,
)
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack", ".onnx")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_GGUF_ON_HUB = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^:]+))?:(?P<file>.+\.gguf)", re.ASCII)


def find_folder(source: str | Path, *, progress: bool = True) -> Path:
    """`source` as a local folder or GGUF file, downloaded first where it is on the hub.

    "demo" and "demo-draft" are the bundled models (a folder of that name is "./demo"). Otherwise a folder that
    exists wins over a hub id. A folder that holds one GGUF model and no config.json is that model. A hub id is
    `owner/name`, optionally with a revision: `owner/name@revision`; a GGUF file on the hub is
    `owner/name:file.gguf`. The hub client's own settings apply: HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
    HF_HUB_DISABLE_PROGRESS_BARS.

    Args:
        source: the name. A `Path` is always a folder, never a hub id.
        progress: show bars while downloading.

    Raises:
        SourceError: no such folder, no such repository, one without safetensors, or the hub cannot be reached.
        CheckpointError: the repository's index of shards cannot be read.
    """
    name = str(source)
    if name in BUNDLED and isinstance(source, str):
        return Path(__file__).parent.parent / "demo" / BUNDLED[name]
    folder = os.path.expanduser(source)
    if os.path.isdir(folder) and name:
        return _gguf_inside(Path(folder)) or Path(folder)
    if os.path.exists(folder) and name:
        if is_gguf(Path(folder)):
            return Path(folder)
        raise SourceError(f"{name} is a file; give a GGUF file, or the folder that holds config.json and the weights")
    if not isinstance(source, Path) and (match := _GGUF_ON_HUB.fullmatch(name)):
        with _as_source_errors(match["repository"], match["revision"]):
            return _download_gguf(match["repository"], match["revision"], match["file"], progress)
    repository, separator, revision = name.partition("@")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(repository):
        also = "" if isinstance(source, Path) else ", and it is no hub id either"
        raise SourceError(
            f"no folder {name!r}{also}; give a folder, a hub id such as 'Qwen/Qwen3-0.6B' (as a str), or 'demo'"
        )
    if separator and not revision:
        raise SourceError(f"{name!r} names no revision after the '@'; write {repository}@revision")
    with _as_source_errors(repository, revision or None):
        return _download(repository, revision or None, progress)


def _gguf_inside(folder: Path) -> Path | None:
    """The GGUF model of a folder that holds one, and nothing in the Hugging Face layout.

    Raises:
        SourceError: it holds several.
    """
    if (folder / "config.json").is_file():
        return None
    firsts = sorted({parts_of(file.name)[0] for file in folder.glob("*.gguf") if file.is_file()})
    if len(firsts) > 1:
        raise SourceError(f"{folder} holds {len(firsts)} GGUF models ({', '.join(firsts[:4])}): give the file of one")
    return folder / firsts[0] if firsts else None


def _download_gguf(repository: str, revision: str | None, file: str, progress: bool) -> Path:
    """A GGUF file of a repository, with the other parts where it is split."""
    path = PurePosixPath(file)
    if lies_outside(file):
        raise SourceError(f"{file!r} is no file inside {repository}")
    files = [str(path.with_name(name)) for name in parts_of(path.name)]
    folder = _fetch(repository, revision, files, progress)
    if absent := [name for name in files if not (folder / name).is_file()]:
        there = [name for name in HfApi().list_repo_files(repository, revision=folder.name) if name.endswith(".gguf")]
        has = f"; it has {', '.join(there[:4])}" if there else ""
        raise SourceError(f"{repository} has no {absent[0]}{has}")
    return folder / files[0]


def find_adapter(source: str | Path, *, progress: bool = False) -> Path:
    """The folder of an adapter: a folder, or a hub id, optionally with "@revision".

    Raises:
        SourceError: there is no such folder or repository.
    """
    folder = os.path.expanduser(source)
    if os.path.isdir(folder) and str(source):
        return Path(folder)
    repository, _, revision = str(source).partition("@")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(repository):
        raise SourceError(f"no folder {str(source)!r}: an adapter is a folder that peft wrote, or a hub id of one")
    with _as_source_errors(repository, revision or None):
        return _fetch(repository, revision or None, ("adapter_config.json", "adapter_model.safetensors"), progress)


def _download(repository: str, revision: str | None, progress: bool) -> Path:
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
            f"{repository!r} is no folder, is not whole in the hub cache, and the hub {_why_not(error)}: "
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
