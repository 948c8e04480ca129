"""`python -m training`: corpus -> tokenizer -> draft -> target -> evaluation -> model card."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .corpus import EVEN, Document, documents
from .data import TokenizedCorpus, tokenize
from .evaluate import load_exported
from .export import export_model
from .settings import Settings, continued, full, smoke
from .tokenizer import END_OF_TEXT, train_tokenizer
from .train import Trainer

STAGES = ("all", "corpus", "train", "evaluate")


def main() -> None:
    arguments = _parser().parse_args()
    settings = smoke(arguments.smoke) if arguments.smoke else full()
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    if arguments.further:
        settings = continued(settings)
    if arguments.stage in ("all", "corpus"):
        build_corpus(settings, arguments.further)
    if arguments.stage in ("all", "train"):
        train_models(settings, arguments.further, arguments.resume)
    if arguments.stage in ("all", "evaluate"):
        from .card import write_card

        write_card(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--stage", choices=STAGES, default="all", help="run one stage on what the others left")
    parser.add_argument("--further", action="store_true", help="begin with the exported weights and their tokenizer")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in training/work")
    parser.add_argument("--smoke", type=Path, metavar="FOLDER", help="tiny run of every stage into FOLDER")
    return parser


def build_corpus(settings: Settings, further: bool) -> None:
    """Generate both splits, train the tokenizer (or take the exported one), and store ids in training/work."""
    began = time.monotonic()
    train = list(documents(settings.train_seed, settings.train_documents))
    texts = [document.text for document in train]
    characters = sum(map(len, texts))
    print(f"corpus: {len(train):,} documents, {characters / 1e6:.1f}M characters, {_since(began)}", flush=True)
    heldout = documents(settings.heldout_seed, settings.heldout_documents, frozenset(texts), EVEN)
    write_heldout(settings.heldout_path, heldout)
    if further:
        tokenizer = Tokenizer.from_file(str(settings.output / "target" / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(texts[:20_000], settings.vocab_size)
    tokenizer.save(str(settings.work / "tokenizer.json"))
    corpus = tokenize(tokenizer, train)
    torch.save(vars(corpus) | {"characters": characters}, settings.work / "corpus.pt")
    print(
        f"tokenizer: {tokenizer.get_vocab_size()} entries; {len(corpus.ids):,} training tokens, "
        f"{characters / len(corpus.ids):.2f} characters a token, {_since(began)}",
        flush=True,
    )


def write_heldout(path: Path, heldout: Iterable[Document]) -> None:
    """The documents, concatenated, each ended by <|endoftext|> on a separate line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{document.text}{END_OF_TEXT}\n" for document in heldout), encoding="utf-8")


def train_models(settings: Settings, further: bool, resume: bool) -> None:
    """Train the draft, then the target; both folders are written early and usable from then on."""
    tokenizer = Tokenizer.from_file(str(settings.work / "tokenizer.json"))
    stored = torch.load(settings.work / "corpus.pt", weights_only=True)
    corpus = TokenizedCorpus(stored["ids"], stored["bounds"], stored["prompts"])
    trainers = (
        Trainer("draft", settings.draft, settings.draft_schedule, settings),
        Trainer("target", settings.target, settings.target_schedule, settings),
    )
    for trainer in trainers:
        if further:
            trainer.start_from(load_exported(settings.output / trainer.name))
        if resume and trainer.resume():
            print(f"{trainer.name}: going on from step {trainer.progress.step}", flush=True)
        export_model(trainer.average, tokenizer, settings.output / trainer.name)
    for trainer in trainers:
        print(f"{trainer.name}: {trainer.model.parameter_count():,} parameters", flush=True)
        trainer.run(
            corpus,
            tokenizer,
            lambda early: export_model(early.average, tokenizer, settings.output / early.name),
        )
        export_model(trainer.average, tokenizer, settings.output / trainer.name)
        print(f"{trainer.name}: exported after {trainer.progress.seconds / 60:.1f} minutes", flush=True)


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    main()
