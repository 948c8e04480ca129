"""Find a model's folder: in the package, on the disk, or on the hub, whose client is imported where it is used."""

import difflib
import os
import re
from pathlib import Path

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.gguf import GgufCheckpoint, is_gguf, parts_of
from onward.errors import SourceError

Checkpoint = CheckpointFolder | GgufCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path of `find_folder`: a GGUF file, or a folder in the Hugging Face layout."""
    return GgufCheckpoint(path) if is_gguf(path) else CheckpointFolder(path)


BUNDLED = {"demo": "target", "demo-draft": "draft"}
# As on the hub: owner/name, or the name alone of an old model such as gpt2.
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_FILES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_GGUF_ON_HUB = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^:]+))?:(?P<file>.+\.gguf)", re.ASCII)


def find_folder(source: str | Path, *, progress: bool = True) -> Path:
    """`source` as a local folder or GGUF file, downloaded first where it is on the hub.

    "demo" and "demo-draft" are the bundled models (a folder of that name is "./demo"). Otherwise a folder that
    exists wins over a hub id. A folder that holds one GGUF model and no config.json is that model. A hub id is
    `owner/name`, or the `name` of a model without an owner such as gpt2, optionally with a revision:
    `owner/name@revision`; a GGUF file on the hub is `owner/name:file.gguf`. The hub client's own settings apply:
    HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS.

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
        from onward.checkpoint.hub import download_gguf

        return download_gguf(match["repository"], match["revision"], match["file"], progress)
    repository, separator, revision = name.partition("@")
    if isinstance(source, Path):
        raise SourceError(f"no folder {name!r}; give a folder, or a hub id such as 'Qwen/Qwen3-0.6B' as a str")
    if not _is_hub_id(repository):
        raise SourceError(
            f"no folder {name!r}, and it cannot be a hub id; give a folder, a hub id such as 'Qwen/Qwen3-0.6B', or "
            f"'demo'{_meant(name)}"
        )
    if separator and not revision:
        raise SourceError(f"{name!r} names no revision after the '@'; write {repository}@revision")
    from onward.checkpoint.hub import download

    try:
        return download(repository, revision or None, progress)
    except SourceError as error:
        if hint := _meant(name):
            raise SourceError(f"{error}{hint}") from error
        raise


def _is_hub_id(repository: str) -> bool:
    """Whether the hub may have a repository of this name. The name of a file of weights is none without an owner."""
    return bool(_HUB_ID.fullmatch(repository)) and ("/" in repository or not repository.endswith(_FILES))


def _meant(name: str) -> str:
    """The bundled model that a name is probably meant to be, as the end of a message; "" where it is like none."""
    close = difflib.get_close_matches(name, BUNDLED, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def _gguf_inside(folder: Path) -> Path | None:
    """The GGUF model of a folder that holds one, and nothing in the Hugging Face layout."""
    if (folder / "config.json").is_file():
        return None
    firsts = sorted({parts_of(file.name)[0] for file in folder.glob("*.gguf") if file.is_file()})
    if len(firsts) > 1:
        raise SourceError(f"{folder} holds {len(firsts)} GGUF models ({', '.join(firsts[:4])}): give the file of one")
    return folder / firsts[0] if firsts else None


def find_adapter(source: str | Path, *, progress: bool = False) -> Path:
    """The folder of an adapter: a folder, or a hub id, optionally with "@revision".

    Raises:
        SourceError: there is no such folder or repository.
    """
    folder = os.path.expanduser(source)
    if os.path.isdir(folder) and str(source):
        return Path(folder)
    repository, _, revision = str(source).partition("@")
    if isinstance(source, Path) or not _is_hub_id(repository):
        raise SourceError(f"no folder {str(source)!r}: an adapter is a folder that peft wrote, or a hub id of one")
    from onward.checkpoint.hub import download_adapter

    return download_adapter(repository, revision or None, progress)
