"""Onward through its public API, with a model that is drawn from its config: speed does not depend on the values."""

import json
from collections.abc import Iterator
from pathlib import Path

import onward
from benchmarks.compare.workers.onward import Onward
from benchmarks.compare.workers.serve import serve
from benchmarks.drawn import random_model


class OnwardDrawn(Onward):
    def load(self) -> None:
        onward.set_num_threads(self.threads)
        model = random_model(self.precision, json.loads(Path(self.model_path).read_text()))
        self.lm = onward.LanguageModel(model)
        self.pieces: Iterator[onward.Piece] = iter(())


if __name__ == "__main__":
    serve(OnwardDrawn)
