"""The target learns to call tools: some hundred more steps, on conversations with tools and documents without."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer

from .corpus import tuning_documents
from .data import tokenize
from .evaluate import load_exported, read_heldout
from .export import export_model
from .settings import Settings
from .train import Trainer

LONGEST_ANSWER = 128  # two calls


def tune(settings: Settings, resume: bool) -> None:
    """Train on the exported target, and export it again. Held-out documents are left out."""
    folder = settings.output / "target"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    heldout = frozenset(text for _, text in read_heldout(settings.heldout_path))
    texts = [text for _, text in tuning_documents(settings.tuning_seed, settings.tuning_documents, heldout)]
    # So few steps end before a compiled one has paid for itself.
    trainer = Trainer("tuned", settings.target, settings.tuning_schedule, replace(settings, compile=False))
    trainer.start_from(load_exported(folder))
    if resume and trainer.resume():
        print(f"{trainer.name}: going on from step {trainer.progress.step}", flush=True)
    trainer.run(tokenize(tokenizer, texts), tokenizer, lambda early: None, longest=LONGEST_ANSWER)
    export_model(trainer.average, tokenizer, folder)
    print(f"{trainer.name}: exported after {trainer.progress.seconds / 60:.1f} minutes", flush=True)
