"""The training loop: AdamW, warm-up and linear decay, an average of the weights, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .data import IGNORED, AnswerFinder, TokenizedCorpus, batches
from .model import ModelConfig, Transformer
from .settings import Schedule, Settings
from .tokenizer import END_OF_TEXT, token_id


@dataclass
class Progress:
    """The cost so far, and whether the training started from finished weights; survives a restart."""

    further: bool = False
    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """One model in training. `average` is exported."""

    def __init__(self, name: str, config: ModelConfig, schedule: Schedule, settings: Settings) -> None:
        torch.manual_seed(schedule.seed)
        self.name, self.schedule, self.settings = name, schedule, settings
        self.model = Transformer(config)
        self.average = Transformer(config)
        self.average.load_state_dict(self.model.state_dict())
        self.optimizer = _optimizer(self.model, schedule)
        self.progress = Progress()

    @property
    def checkpoint_path(self) -> Path:
        return self.settings.work / f"{self.name}.checkpoint.pt"

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        wanted = targets != IGNORED
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model.head(self.model.hidden(inputs)[wanted])
        return F.cross_entropy(logits.float(), targets[wanted])

    def learning_rate(self) -> float:
        """Linear warm-up, then linear decay to zero at the last token."""
        warm = min(1.0, (self.progress.step + 1) / self.schedule.warmup_steps)
        left = max(0.0, 1.0 - self.progress.tokens / self.schedule.tokens)
        return self.schedule.peak_lr * warm * left

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Run one update; returns its loss in nats per token."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self._loss(inputs, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.progress.step += 1
        self.progress.tokens += inputs.numel()
        self.progress.trained_tokens += int((targets != IGNORED).sum())
        return float(loss.detach())

    @torch.no_grad()
    def _update_average(self) -> None:
        keep = min(self.schedule.average_decay, self.progress.step / (self.progress.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1.0 - keep)

    def save(self) -> None:
        """Write a checkpoint under a temporary name, then replace the old one: a crash leaves one of the two."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        fresh = self.checkpoint_path.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint_path)

    def start_from(self, weights: Transformer) -> None:
        """Start from the weights of a finished model."""
        self.model.load_state_dict(weights.state_dict())
        self.average.load_state_dict(weights.state_dict())
        self.progress.further = True

    def resume(self) -> bool:
        """Continue from the checkpoint, if there is one."""
        if not self.checkpoint_path.exists():
            return False
        state = torch.load(self.checkpoint_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True

    def run(self, corpus: TokenizedCorpus, tokenizer: Tokenizer, on_early: Callable[[Trainer], None]) -> None:
        """Train to the last token of the schedule; `on_early` is called once, when the model is usable."""
        source = batches(
            corpus,
            self.schedule.tokens_per_step,
            self.schedule.seed,
            token_id(tokenizer, END_OF_TEXT),
            AnswerFinder(tokenizer),
            self.schedule.text_share,
        )
        for _ in range(self.progress.step):
            next(source)
        began = last_saved = time.monotonic()
        already, exported_early = self.progress.seconds, False
        losses: list[float] = []
        while self.progress.tokens < self.schedule.tokens:
            losses.append(self.step(*next(source)))
            now = time.monotonic()
            self.progress.seconds = already + now - began
            if self.progress.step % 25 == 0:
                self._report(sum(losses) / len(losses))
                losses = []
            if now - last_saved > self.settings.checkpoint_seconds:
                self.save()
                last_saved = now
            if not exported_early and now - began > self.settings.early_export_seconds:
                exported_early = True
                on_early(self)
        self.save()

    def _report(self, loss: float) -> None:
        progress, total = self.progress, self.schedule.tokens
        speed = progress.tokens / progress.seconds
        minutes = (total - progress.tokens) / speed / 60
        print(
            f"{self.name} step {progress.step:5d}  loss {loss:.4f}  lr {self.learning_rate():.2e}  "
            f"{progress.tokens / 1e6:.2f}/{total / 1e6:.0f}M tokens  {speed:,.0f} tokens/s  {minutes:.1f} min left",
            flush=True,
        )


def _optimizer(model: Transformer, schedule: Schedule) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.peak_lr, betas=(0.9, 0.95), fused=True)
