"""A path -> what reads the checkpoint there."""

from pathlib import Path

from onward.checkpoint.folder import CheckpointFolder
from onward.checkpoint.gguf import GgufCheckpoint, is_gguf

Checkpoint = CheckpointFolder | GgufCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path of `find_folder`: a GGUF file, or a folder in the Hugging Face layout."""
    return GgufCheckpoint(path) if is_gguf(path) else CheckpointFolder(path)
