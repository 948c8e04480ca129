"""What every rank has to know to hold its part of a model."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Settings:
    """source: the checkpoint, a path of `find_folder`. dtype, quantize, compile: as `onward.load` takes them. context:
    the most positions of a text. threads: of each rank's kernels; None: its own default."""

    source: str
    pipeline: int
    dtype: str | None
    quantize: str | None
    compile: str
    context: int
    threads: int | None

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.pipeline

    @property
    def path(self) -> Path:
        return Path(self.source)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        assert dtype is None or isinstance(dtype, torch.dtype)
        return dtype

    def at(self, source: str | Path) -> "Settings":
        """The same with the checkpoint in another place."""
        return dataclasses.replace(self, source=str(source))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of_json(text: str) -> "Settings":
        return Settings(**json.loads(text))
