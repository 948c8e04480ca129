"""Loading a model as a command does: with something to look at meanwhile."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import onward
from onward.cli.flags import AdapterFlags, DraftFlags, ModelFlags
from onward.cli.prompt import expanded, expanded_source
from onward.cli.terminal import is_terminal, waiting

if TYPE_CHECKING:
    from onward import LanguageModel


def load_model(
    flags: ModelFlags, drafting: DraftFlags | None = None, adapting: AdapterFlags | None = None
) -> "LanguageModel":
    """`onward.load` of what the flags say."""
    adapters = {} if adapting is None else adapting.sources()
    draft = None if drafting is None or drafting.draft is None else expanded_source(drafting.draft)
    name_map = None if flags.name_map is None else expanded(flags.name_map)
    if flags.threads is not None:
        _set_threads(flags.threads)
    folder = find(flags.model)
    with waiting(f"loading {flags.model} …") as show:
        return onward.load(
            folder,
            dtype=flags.dtype,
            device=flags.device,
            progress=show,
            max_seq_len=flags.max_seq_len,
            quantize=flags.quantize,
            name_map=name_map,
            draft=draft,
            compile=flags.compile,
            merge=None if flags.merge is None else expanded_source(flags.merge),
            pipeline=flags.pipeline,
            adapters={name: expanded_source(source) for name, source in adapters.items()},
        )


def _set_threads(count: int) -> None:
    """Of the kernels, and of torch's operators where those run instead."""
    onward.set_num_threads(count)
    with waiting("starting …"):
        import torch
    torch.set_num_threads(count)


def find(source: str) -> Path:
    """The folder of a source, downloaded if it must be."""
    with waiting("starting …"):
        from onward.checkpoint import find_folder
    # Outside the spinner: the hub's client draws bars of its own.
    return find_folder(expanded_source(source), progress=is_terminal(sys.stderr))
