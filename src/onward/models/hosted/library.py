"""transformers, which is an extra: imported when a model is first loaded through it."""

import importlib
from typing import Any

from onward.errors import RequestError

NAME = "onward"  # under which its registries know our attention, masks and experts


def library(module: str = "") -> Any:
    """The package, or a module of it.

    Raises:
        RequestError: it is not installed, or too old for its registries.
    """
    try:
        return importlib.import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as error:
        raise RequestError(
            f"via='transformers' wants transformers 5 or newer ({error}): pip install 'onward[transformers]'"
        ) from error


class NotHostedError(RequestError):
    """A module of transformers whose attention cannot run over Onward's caches; the message says why."""
