"""All settings of the training, in two presets: the shipped models, and a smoke run for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .model import ModelConfig

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Schedule:
    """The training settings of one model. Token counts include padding, because padding takes the same time."""

    tokens: int
    tokens_per_step: int = 8192
    peak_lr: float = 3e-3
    warmup_steps: int = 100
    text_share: float = 0.3
    weight_decay: float = 0.1
    average_decay: float = 0.99
    seed: int = 1


@dataclass(frozen=True)
class Settings:
    """All settings of one rebuild."""

    work: Path
    output: Path
    heldout_path: Path
    train_documents: int
    heldout_documents: int
    train_seed: int
    heldout_seed: int
    vocab_size: int
    target: ModelConfig
    draft: ModelConfig
    target_schedule: Schedule
    draft_schedule: Schedule
    tool_conversations: int
    opening_seeds: int
    early_export_seconds: float = 240.0
    checkpoint_seconds: float = 120.0
    sample_tokens: int = 400
    threads: int = 2


def full() -> Settings:
    """The shipped models."""
    vocab_size = 2048
    return Settings(
        work=REPOSITORY / "training" / "work",
        output=REPOSITORY / "src" / "onward" / "demo",
        heldout_path=REPOSITORY / "training" / "heldout.txt",
        train_documents=64_000,
        heldout_documents=150,
        train_seed=20_261_126,
        heldout_seed=990_317,
        vocab_size=vocab_size,
        target=ModelConfig(192, 512, 6, 4, 2, 64, vocab_size),
        draft=ModelConfig(128, 256, 2, 2, 1, 64, vocab_size),
        target_schedule=Schedule(tokens=30_000_000, peak_lr=3e-3),
        draft_schedule=Schedule(tokens=13_000_000, peak_lr=5e-3, text_share=1.0, seed=2),
        tool_conversations=75,
        opening_seeds=10,
    )


def continued(settings: Settings) -> Settings:
    """A sixth of the tokens in smaller steps at a lower rate, for models that start from existing weights."""

    def shorter(schedule: Schedule) -> Schedule:
        return replace(
            schedule,
            tokens=schedule.tokens // 6,
            tokens_per_step=schedule.tokens_per_step // 2,
            peak_lr=schedule.peak_lr / 3,
            seed=schedule.seed + 2,
        )

    schedules = {"target_schedule": settings.target_schedule, "draft_schedule": settings.draft_schedule}
    return replace(settings, **{name: shorter(schedule) for name, schedule in schedules.items()})


def smoke(output: Path) -> Settings:
    """All stages in seconds; the resulting models have learned almost nothing."""
    settings = full()
    vocab_size = 512
    return replace(
        settings,
        work=output / "work",
        output=output / "demo",
        heldout_path=output / "heldout.txt",
        train_documents=120,
        heldout_documents=12,
        vocab_size=vocab_size,
        target=replace(settings.target, hidden_size=32, intermediate_size=48, num_layers=2, vocab_size=vocab_size),
        draft=replace(settings.draft, hidden_size=16, intermediate_size=32, num_layers=1, vocab_size=vocab_size),
        target_schedule=Schedule(tokens=20_000, tokens_per_step=2048, warmup_steps=2, average_decay=0.5),
        draft_schedule=Schedule(tokens=20_000, tokens_per_step=2048, warmup_steps=2, average_decay=0.5, seed=2),
        tool_conversations=2,
        opening_seeds=1,
        sample_tokens=8,
    )
