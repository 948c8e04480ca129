"""Resolve a model source: bundled, local, or on the hub. The hub client is imported on first use."""

import difflib
import os
import re
from pathlib import Path

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.gguf import GgufCheckpoint, is_gguf, parts_of
from onward.errors import SourceError

Checkpoint = CheckpointFolder | GgufCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a path that `find_folder` returned: a GGUF file, or a folder in the Hugging Face layout."""
    return GgufCheckpoint(path) if is_gguf(path) else CheckpointFolder(path)


BUNDLED = {"demo": "target", "demo-draft": "draft"}
# The hub's format: owner/name, or only the name of an old model such as gpt2.
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_GGUF_ON_HUB = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^:]+))?:(?P<file>.+\.gguf)", re.ASCII)


def find_folder(source: str | Path, *, progress: bool = True) -> Path:
    """Return `source` as a local folder or GGUF file, downloading it first if it is on the hub.

    "demo" and "demo-draft" are the bundled models (use "./demo" for a folder of that name). An existing folder takes
    precedence over a hub id; one with a single GGUF model and no config.json resolves to that model. A hub id is
    `owner/name`, or `name` for a model without an owner such as gpt2, optionally followed by `@revision`;
    `owner/name:file.gguf` is a GGUF file on the hub. The hub client's own settings apply: HF_ENDPOINT, HF_HOME,
    HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS.

    Args:
        source: a path or hub id. A `Path` is always local.
        progress: show progress bars while downloading.

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
        raise SourceError(f"{name} is a file, but not a GGUF file; give the folder with config.json and the weights")
    if not isinstance(source, Path) and (match := _GGUF_ON_HUB.fullmatch(name)):
        from onward.checkpoint.hub import download_gguf

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
    from onward.checkpoint.hub import download

    try:
        return download(repository, revision or None, progress)
    except SourceError as error:
        raise SourceError(f"{error}{_did_you_mean(name)}") from error


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


def find_adapter(source: str | Path, *, progress: bool = False) -> Path:
    """Return the folder of an adapter: a local folder, or a hub id, optionally with "@revision".

    Raises:
        SourceError: no such folder or repository.
    """
    folder = os.path.expanduser(source)
    if os.path.isdir(folder) and str(source):
        return Path(folder)
    repository, _, revision = str(source).partition("@")
    if isinstance(source, Path) or not _is_hub_id(repository):
        raise SourceError(f"no folder {str(source)!r}: give a folder that peft wrote, or the hub id of an adapter")
    from onward.checkpoint.hub import download_adapter

    return download_adapter(repository, revision or None, progress)
