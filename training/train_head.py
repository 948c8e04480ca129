"""`python -m training.train_head`: trains an EAGLE-3 head of the exported target on the corpus.

The head learns the target's distributions, from the hidden states that `lm.hidden_states` captures. It is exported
whenever the training stops, at the last step or after --seconds; called again, it goes on. --evaluate counts how many
tokens of its drafts the target accepts, beside the other drafters.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

import onward
from onward.decoding.speculation import PromptLookup, Speculation, Speculator, SuffixLookup

from .corpus import KINDS, documents
from .data import AnswerFinder, tokenize
from .evaluate import load_exported, read_heldout
from .export import sizes, write_json
from .head import Head
from .model import ModelConfig
from .settings import full

TARGET, HELDOUT = full().output / "target", full().heldout_path
SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1": {"temperature": 1.0, "top_p": 1.0},
}


@dataclass(frozen=True)
class HeadSettings:
    """Sizes and schedule. draft_vocab_size: its ids are the most frequent ones of the texts. layers: whose outputs it
    reads. kinds: the shares of documents by kind. max_tokens: of a text. unrolled: tokens of a draft, each of which
    counts `decay` times as much as the one before it."""

    draft_vocab_size: int = 1024
    intermediate_size: int = 320
    num_heads: int = 4
    num_kv_heads: int = 1
    layers: tuple[int, ...] = (1, 3, 5)
    texts: int = 10_000
    kinds: tuple[float, ...] = (0.5, 0.1, 0.1, 0.22, 0.08)
    max_tokens: int = 384
    tokens_per_step: int = 2048
    steps: int = 1000
    unrolled: int = 3
    decay: float = 0.8
    peak_lr: float = 4e-3
    warmup_steps: int = 30
    seed: int = 20_261_127

    def config(self, target: ModelConfig) -> ModelConfig:
        """The sizes of the head's layer."""
        sizes = {"intermediate_size": self.intermediate_size, "num_heads": self.num_heads}
        return replace(target, num_layers=1, num_kv_heads=self.num_kv_heads, **sizes)


class Text(NamedTuple):
    """The ids of a document, and which of them a model would generate."""

    ids: list[int]
    generated: list[bool]


def prompt_of(kind: str, text: str, rng: random.Random) -> str:
    """The beginning of a document: some words of a story, or all up to one of its answers."""
    if kind == "story":
        return " ".join(text.split(" ")[: rng.randint(1, 12)])
    mark = {"qa": "\nAnswer:", "json": "\n{"}.get(kind, "<|im_start|>assistant\n")
    ends = [at + len(mark) for at in range(len(text)) if text.startswith(mark, at)]
    return text[: rng.choice(ends)].removesuffix("{")


class HeadTrainer:
    """The head in training, with its texts."""

    def __init__(self, settings: HeadSettings, work: Path) -> None:
        self.settings, self.work = settings, work
        self.lm = onward.load(TARGET)
        self.lm.prefix_memory = 0
        self.texts = self._texts()
        self.batches = self._batches()
        model = load_exported(TARGET)
        self.embedding = model.model.embed_tokens.weight.detach()
        counts = torch.zeros(len(self.embedding), dtype=torch.long)
        for text in self.texts:
            counts += torch.bincount(torch.tensor(text.ids)[torch.tensor(text.generated)], minlength=len(counts))
        self.ids = counts.argsort(descending=True, stable=True)[: settings.draft_vocab_size].sort().values
        self.coverage = float(counts[self.ids].sum() / counts.sum())
        torch.manual_seed(settings.seed)
        self.head = Head(settings.config(model.config), settings.draft_vocab_size, len(settings.layers))
        with torch.no_grad():  # the target's head is its embedding
            self.head.lm_head.weight.copy_(self.embedding[self.ids])
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=settings.peak_lr, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds = 0, 0.0
        if (work / "head.checkpoint.pt").exists():
            state = torch.load(work / "head.checkpoint.pt", weights_only=True)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]

    def _texts(self) -> list[Text]:
        """Documents of the corpus that the target was not trained on, nor is evaluated with."""
        settings, tokenizer = self.settings, Tokenizer.from_file(str(TARGET / "tokenizer.json"))
        known, finder = frozenset(text for _, text in read_heldout(HELDOUT)), AnswerFinder(tokenizer)
        originals = list(documents(settings.seed, settings.texts, known, settings.kinds))
        corpus = tokenize(tokenizer, originals)
        texts = []
        for index, prompt in enumerate(corpus.prompts.tolist()):
            ids = corpus.document(index)[: settings.max_tokens]
            # A model continues a text without turns with further questions; in a chat it generates answers only.
            turns = originals[index].kind in ("chat", "tools")
            answers = finder.flags(ids) if turns else [True] * len(ids)
            generated = [at >= prompt and answer for at, answer in enumerate(answers)]
            if any(generated[2:]):
                texts.append(Text(ids, generated))
        return texts

    def _batches(self) -> list[list[Text]]:
        """All texts in batches of similar lengths, in a seeded order."""
        texts = sorted(self.texts, key=lambda text: len(text.ids))
        batches, begin = [], 0
        while begin < len(texts):
            count = max(1, self.settings.tokens_per_step // len(texts[begin].ids))
            batches.append(texts[begin : begin + count])
            begin += count
        random.Random(self.settings.seed).shuffle(batches)
        return batches

    @torch.no_grad()
    def captured(self, batch: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """The features [B, T, W] of each position, the embeddings [B, T, D] of the tokens after them, and the target's
        hidden states [B, T, D] after these tokens, padded with zeros."""
        taps = [f"layers.{layer}" for layer in self.settings.layers]
        states = self.lm.hidden_states([text.ids for text in batch], [*taps, "norm"])
        pad = torch.nn.utils.rnn.pad_sequence
        features = pad([torch.cat([each[tap] for tap in taps], -1)[:-1].float() for each in states], batch_first=True)
        embedded = pad([self.embedding[torch.tensor(text.ids[1:])] for text in batch], batch_first=True)
        return features, embedded, pad([each["norm"][1:].float() for each in states], batch_first=True)

    def losses(self, batch: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each step of a draft, the cross-entropy with the target's distribution in nats, and the share of equal
        greedy choices, where a generated token is predicted."""
        features, embedded, after = self.captured(batch)
        pad = torch.nn.utils.rnn.pad_sequence
        # At position t the head has the token at t + 1, and predicts the one at t + 2.
        counted = pad([torch.tensor([*text.generated[2:], False]) for text in batch], batch_first=True)
        probabilities = (after[counted] @ self.embedding.T).softmax(-1)
        best, draftable = probabilities.argmax(-1), probabilities[:, self.ids]
        positions = torch.arange(counted.shape[1]).expand_as(counted)[counted]
        for step, hidden in enumerate(self.head(features, embedded, self.settings.unrolled)):
            inside = positions >= step
            logits = self.head.lm_head(hidden[counted][inside])
            loss = -(draftable[inside] * logits.log_softmax(-1)).sum(-1).mean()
            yield loss, (self.ids[logits.argmax(-1)] == best[inside]).float().mean()

    def run(self, seconds: float) -> None:
        """Train until the last step, or for so many seconds and at least a step, and store a checkpoint."""
        settings, began, first = self.settings, time.monotonic(), self.step
        seen: list[list[float]] = []
        while self.step < settings.steps and (self.step == first or time.monotonic() - began < seconds):
            warm, left = min(1.0, (self.step + 1) / settings.warmup_steps), 1.0 - self.step / settings.steps
            self.optimizer.param_groups[0]["lr"] = settings.peak_lr * warm * left
            pairs = list(self.losses(self.batches[self.step % len(self.batches)]))
            loss = sum(settings.decay**step * each for step, (each, _) in enumerate(pairs))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            seen.append([float(each.detach()) for pair in pairs for each in pair])
            if self.step % 10 == 0:
                means = torch.tensor(seen).mean(0).tolist()
                shown = "  ".join(f"{means[i]:.3f} {means[i + 1]:.1%}" for i in range(0, len(means), 2))
                print(f"step {self.step}/{settings.steps}  {time.monotonic() - began:.0f} s  {shown}", flush=True)
                seen = []
        self.seconds += time.monotonic() - began
        self.work.mkdir(parents=True, exist_ok=True)
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"step": self.step, "seconds": self.seconds}, self.work / "head.checkpoint.pt")

    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors in the layout of published heads, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        config, settings = self.head.config, self.settings
        write_json(
            folder / "config.json",
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                **sizes(config),
                "draft_vocab_size": settings.draft_vocab_size,
                "tie_word_embeddings": False,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": list(settings.layers),
                    "use_aux_hidden_state": True,
                },
                "torch_dtype": "bfloat16",
            },
        )
        weights = {name: x.detach().to(torch.bfloat16).contiguous() for name, x in self.head.state_dict().items()}
        weights["d2t"] = self.ids - torch.arange(len(self.ids))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)


def acceptance(head: Path, *, every: int = 4, new_tokens: int = 64) -> Iterator[str]:
    """Rows of a Markdown table: the tokens of a round that the target accepts, by sampling and drafter, for drafts of 1
    to 4 tokens and, with 4, by kind of text. The prompts are from every n-th held-out document."""
    rng, lengths = random.Random(1), (1, 2, 3, 4)
    lm = onward.load(TARGET, draft=head)
    assert lm.draft is not None
    heldout = read_heldout(HELDOUT)[::every]
    prompts = [lm.encode(prompt_of(kind, text, rng)) for kind, text in heldout]
    drafters: dict[str, Any] = {
        "head": lm.draft.drafter,
        "draft model": onward.load(TARGET.parent / "draft"),
        "prompt lookup": PromptLookup(),
        "suffix lookup": SuffixLookup(max_tokens=0),
    }
    yield f"| sampling | drafter | {' | '.join(map(str, [*lengths, *KINDS]))} |"
    yield "|---|---|" + "--:|" * (len(lengths) + len(KINDS))
    for (name, sampling), drafter in itertools.product(SAMPLINGS.items(), drafters):
        cells: list[str] = []
        for length in lengths:
            options: Any = {"max_new_tokens": new_tokens, "seed": 7, **sampling}
            done = lm.generate(prompts, draft=Speculator(drafters[drafter], length=length), **options)
            counts = [(kind, each.speculation) for (kind, _), each in zip(heldout, done, strict=True)]
            cells.append(_accepted(counts, KINDS))
        cells += [_accepted(counts, (kind,)) for kind in KINDS]
        yield f"| {name} | {drafter} | {' | '.join(cells)} |"


def _accepted(counts: Sequence[tuple[str, Speculation | None]], kinds: Sequence[str]) -> str:
    """Accepted tokens of a round."""
    found = [each for kind, each in counts if kind in kinds and each is not None]
    rounds = sum(each.rounds for each in found)
    return f"{sum(each.accepted for each in found) / rounds:.2f}" if rounds else "-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.train_head", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--evaluate", action="store_true", help="only count accepted tokens")
    arguments = parser.parse_args()
    folder = TARGET.parent / "head"
    if arguments.evaluate:
        for line in acceptance(folder):
            print(line, flush=True)
        return
    trainer = HeadTrainer(HeadSettings(), full().work)
    count = sum(x.numel() for x in trainer.head.parameters())
    print(f"{count:,} parameters, {trainer.coverage:.2%} of the texts' tokens have a draft id", flush=True)
    trainer.run(arguments.seconds)
    trainer.export(folder)
    print(f"exported after step {trainer.step}, {trainer.seconds / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
