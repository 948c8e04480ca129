"""Find a model's folder: in the package, on the disk, or on the hub.

The hub's client is imported where it is asked: that takes a tenth of a second, which a model on the disk need not wait.
"""

import os
import re
from pathlib import Path

from onward.checkpoint.gguf import is_gguf, parts_of
from onward.errors import SourceError

BUNDLED = {"demo": "target", "demo-draft": "draft"}
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
        from onward.checkpoint.hub import download_gguf

        return download_gguf(match["repository"], match["revision"], match["file"], progress)
    repository, separator, revision = name.partition("@")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(repository):
        also = "" if isinstance(source, Path) else ", and it is no hub id either"
        raise SourceError(
            f"no folder {name!r}{also}; give a folder, a hub id such as 'Qwen/Qwen3-0.6B' (as a str), or 'demo'"
        )
    if separator and not revision:
        raise SourceError(f"{name!r} names no revision after the '@'; write {repository}@revision")
    from onward.checkpoint.hub import download

    return download(repository, revision or None, progress)


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
    from onward.checkpoint.hub import download_adapter

    return download_adapter(repository, revision or None, progress)
