"""The model card: measures the exported models and writes src/onward/demo/README.md."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .corpus import KINDS, tool_chats
from .evaluate import (
    Evaluation,
    KindScore,
    difference_from_transformers,
    evaluate,
    load_exported,
    read_heldout,
    rounding_cost,
)
from .model import Transformer
from .samples import draw_samples
from .settings import Schedule, Settings
from .tool_calls import right_answers
from .train import Progress

# Float32 sums of a few hundred products in another order, over logits of magnitude up to about 30.
TRANSFORMERS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Trained:
    """One model as shipped, and what its training spent."""

    name: str
    model: Transformer
    progress: Progress
    schedule: Schedule
    bytes: int


def write_card(settings: Settings) -> None:
    """Evaluate the exported folders, print the numbers, and write the card and metrics.json."""
    tokenizer = Tokenizer.from_file(str(settings.output / "target" / "tokenizer.json"))
    heldout = read_heldout(settings.heldout_path)
    target = _trained("target", settings, settings.target_schedule)
    draft = _trained("draft", settings, settings.draft_schedule)
    tuned = Progress(**_checkpoint(settings, "tuned")["progress"])
    evaluation = evaluate(target.model, draft.model, tokenizer, heldout)
    for line in _score_table(evaluation):
        print(line, flush=True)
    checks = _checks(settings, tokenizer.encode(heldout[0][1]).ids[:512])
    for line in checks:
        print(line, flush=True)
    sections = [
        _introduction(settings),
        _sizes(target, draft, tokenizer),
        _corpus(settings, heldout),
        [*_training(target, draft, settings), "", *_tuning(tuned)],
        ["## Held-out loss", "", *_heldout_notes(), "", *_score_table(evaluation)],
        tools_section(settings, tokenizer),
        ["## Checks", "", *(f"- {line}" for line in checks)],
        ["## Unedited samples", "", *draw_samples(settings.output / "target", tokenizer, settings.sample_tokens)],
        _limits(),
    ]
    text = "\n\n".join("\n".join(section) for section in sections) + "\n"
    (settings.output / "README.md").write_text(text, encoding="utf-8")
    metrics = {"loss": evaluation.target["all"].loss, "draft_loss": evaluation.draft["all"].loss}
    metrics |= {"agreement": evaluation.agreement["all"], "accepted_in_a_row": evaluation.accepted_in_a_row}
    (settings.work / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print(f"card: {settings.output / 'README.md'}", flush=True)


def _trained(name: str, settings: Settings, schedule: Schedule) -> Trained:
    folder = settings.output / name
    state = _checkpoint(settings, name)
    size = (folder / "model.safetensors").stat().st_size
    return Trained(name, load_exported(folder), Progress(**state["progress"]), schedule, size)


def _checkpoint(settings: Settings, name: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(settings.work / f"{name}.checkpoint.pt", weights_only=True)
    return state


def _checks(settings: Settings, ids: list[int]) -> list[str]:
    """Hold both folders against transformers, and measure what rounding to bfloat16 cost."""
    lines = []
    for name, made, config in (("target", "tuned", settings.target), ("draft", "draft", settings.draft)):
        folder = settings.output / name
        difference = difference_from_transformers(folder, ids)
        if difference > TRANSFORMERS_TOLERANCE:
            raise RuntimeError(
                f"{folder}: transformers' logits differ by {difference:.2e} (> {TRANSFORMERS_TOLERANCE})"
            )
        trained = Transformer(config)
        trained.load_state_dict(_checkpoint(settings, made)["average"])
        logit, loss = rounding_cost(trained.eval(), folder, ids)
        lines.append(
            f"{name}: logits equal transformers' `Qwen3ForCausalLM` within {difference:.1e} (float32, {len(ids)} "
            f"tokens); rounding the weights to bfloat16 moved a logit by at most {logit:.2f} and the loss by "
            f"{loss:+.4f} nats."
        )
    return lines


def _introduction(settings: Settings) -> list[str]:
    return [
        "# The demo model",
        "",
        "A very small language model, trained by the Onward project, so that everything here can be tried on real",
        "input within seconds of installing. It tells short stories, answers questions about them and copies their",
        "facts into JSON, as plain text or as a chat. `target/` is the model; `draft/` is a much smaller one of the",
        "same tokenizer, for speculative decoding. Both are in the layout of `Qwen3ForCausalLM` (bfloat16).",
        "",
        "This page is written by `python -m training`, which rebuilds the corpus, the tokenizer and both models.",
        "The models and the corpus are the project's own work, under the project's licence.",
    ]


def _sizes(target: Trained, draft: Trained, tokenizer: Tokenizer) -> list[str]:
    def row(label: str, *values: object) -> str:
        return f"| {label} | " + " | ".join(map(str, values)) + " |"

    t, d = target.model.config, draft.model.config
    counts = [model.model.parameter_count() for model in (target, draft)]
    return [
        "## Sizes",
        "",
        "| | target | draft |",
        "|---|---|---|",
        row("parameters (embedding shared with the head)", *(f"{count:,}" for count in counts)),
        row("model.safetensors, bytes", f"{target.bytes:,}", f"{draft.bytes:,}"),
        row("layers", t.num_layers, d.num_layers),
        row("hidden size / MLP size", *(f"{c.hidden_size} / {c.intermediate_size}" for c in (t, d))),
        row("query heads / KV heads / head_dim", *(f"{c.num_heads} / {c.num_kv_heads} / {c.head_dim}" for c in (t, d))),
        row("vocabulary", tokenizer.get_vocab_size(), tokenizer.get_vocab_size()),
        row("context, tokens", t.max_position_embeddings, d.max_position_embeddings),
        "",
        f"The draft has {counts[1] / counts[0]:.1%} of the target's parameters. The tokenizer is byte-level BPE: any",
        "text makes the round trip, and every digit is a token. Special tokens: `<|endoftext|>` (BOS, padding and the",
        "end of a document), `<|im_start|>` and `<|im_end|>` (ChatML). `generation_config.json` ends a text at either",
        "`<|im_end|>` or `<|endoftext|>`.",
    ]


def _corpus(settings: Settings, heldout: list[tuple[str, str]]) -> list[str]:
    stored = torch.load(settings.work / "corpus.pt", weights_only=True)
    count, documents = len(stored["ids"]), len(stored["bounds"]) - 1
    kinds = ", ".join(f"{sum(kind == k for kind, _ in heldout)} {k}" for k in KINDS)
    size = settings.heldout_path.stat().st_size
    return [
        "## Corpus",
        "",
        f"{documents:,} documents, {stored['characters'] / 1e6:.1f} M characters, {count:,} tokens, written by a",
        f"seeded grammar (`training/corpus/`, seed {settings.train_seed}): no text from anywhere else. A story draws",
        "its facts first (two characters with name, kind, trait and pronouns; an object and its color; places,",
        "weather, food, feeling) and one of ten plots; then templates tell it, and the questions and extractions",
        "follow from the same facts.",
        "Six names in ten are put together from syllables, so that names must be copied and not known by heart.",
        "",
        f"Held-out text (`training/heldout.txt`, {size:,} bytes; {kinds}) comes from the **same grammar** with another",
        f"seed ({settings.heldout_seed}), without any document of the training text. It measures how well the grammar",
        "was learned, and says nothing about English at large.",
    ]


def _training(target: Trained, draft: Trained, settings: Settings) -> list[str]:
    context = target.model.config.max_position_embeddings
    lines = ["## Training", "", "| | target | draft |", "|---|---|---|"]
    pair = (target, draft)

    def add(label: str, values: list[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(values) + " |")

    add("target tokens (see below)", [f"{m.progress.trained_tokens:,}" for m in pair])
    add("the same with padding", [f"{m.progress.tokens:,}" for m in pair])
    add("steps", [f"{m.progress.step:,}" for m in pair])
    add("minutes", [f"{m.progress.seconds / 60:.1f}" for m in pair])
    add("peak learning rate", [f"{m.schedule.peak_lr:g}" for m in pair])
    lines += [
        "",
        "AdamW (0.9, 0.95; decay 0.1 on matrices), warm-up then linear decay to zero, gradients clipped at 1, an",
        f"average of the weights (decay {target.schedule.average_decay}). One document a row of up to {context}",
        "tokens, so attention never crosses documents. bfloat16 autocast over float32 weights, torch.compile.",
        f"Of the target model's text outside short answers only a share of {target.schedule.text_share:g}, drawn",
        "at random, is a training target, so that answers, which must be looked up in the text, weigh more.",
        f"Machine: {_cpu()}, {settings.threads} threads, torch {torch.__version__}, shared with other",
        "work at low priority.",
    ]
    return lines


def _tuning(tuned: Progress) -> list[str]:
    return [
        f"Then the target learned to call tools: {tuned.step:,} more steps on {tuned.trained_tokens:,} target tokens",
        f"({tuned.tokens:,} with padding, {tuned.seconds / 60:.0f} minutes), half of them of conversations with tools",
        "(`training/tune.py`).",
    ]


def tools_section(settings: Settings, tokenizer: Tokenizer) -> list[str]:
    """How often answers are right where tools are offered, on conversations of the held-out seed."""
    conversations = tool_chats(settings.heldout_seed, settings.tool_conversations)
    answers = right_answers(settings.output / "target", tokenizer, conversations)
    kinds = {
        "call": "one call, its name and arguments exactly those asked for",
        "calls": "two calls in one answer, likewise",
        "result": "a result, told word for word",
        "talk": "an answer that needs no tool, and calls none",
    }
    return [
        "## Tools",
        "",
        f"Greedy answers in {settings.tool_conversations} conversations with tools, of a seed that nothing was trained",
        "on. A call that has to come (`tool_choice`) is valid by its grammar; these were free to be anything.",
        "",
        "| wanted | right | asked |",
        "|---|---|---|",
        *(f"| {kinds[kind]} | {right} | {asked} |" for kind, (right, asked) in answers.items()),
    ]


def _cpu() -> str:
    """The processor's name, from Linux's own list where there is one."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()


def _heldout_notes() -> list[str]:
    return [
        "Nats a token, with the bfloat16 weights computed in float32; all tokens count, the users' turns too, and",
        "much of what is left is the grammar's free choices (names, colors, which plot), which nothing can predict.",
        "`equal argmax` is the share of positions where draft and target choose the same token given the true text:",
        "the acceptance rate of one greedy draft token.",
    ]


def _score_table(evaluation: Evaluation) -> list[str]:
    def cells(score: KindScore) -> str:
        return f"{score.loss:.4f} | {score.perplexity:.3f}"

    lines = [
        "| kind | documents | tokens | target loss | perplexity | draft loss | perplexity | equal argmax |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in (*KINDS, "all"):
        target, draft = evaluation.target[kind], evaluation.draft[kind]
        if target.tokens:
            agreement = f"{evaluation.agreement[kind]:.1%}"
            lines.append(
                f"| {kind} | {target.documents} | {target.tokens:,} | {cells(target)} | {cells(draft)} | {agreement} |"
            )
    return [
        *lines,
        "",
        f"Of the next 4 draft tokens, {evaluation.accepted_in_a_row:.2f} are equal in a row on average.",
        f"The target's greedy answers are right, word for word: {_right(evaluation)}.",
    ]


def _right(evaluation: Evaluation) -> str:
    counts = evaluation.right_answers.items()
    return ", ".join(f"{right} of {total} {what}" for what, (right, total) in counts)


def _limits() -> list[str]:
    return [
        "## What it cannot do",
        "",
        "- It knows nothing of the world: no facts, no arithmetic, no code, no language but simple English. Asked for",
        "  such things it mostly says so; that answer, too, was learned as a sentence, and an unusual request gets a",
        "  story or an answer that makes no sense instead.",
        "- It knows ten plots and a few hundred words. Asked for anything outside of them it falls back on them:",
        "  a story about a word that the grammar lacks may be about something else.",
        "- Its questions and JSON keys are those of the grammar (name, kind, trait, friend, friend_kind, object,",
        "  color, place, food, weather, feeling, home, problem; in notes also count, item, day, age, city, hour).",
        "  Phrased in another way, a question may get the answer to another one. Long invented names are sometimes",
        "  copied wrong.",
        "- Text of its user is best like its own: short plain sentences. It does not understand an arbitrary article.",
        "- The grammar has two characters a story and at most a few stories a chat; a chat ends with the context.",
        "- How often its answers are right is measured above, on text of its own grammar; elsewhere it is worse.",
        "- It calls tools whose user says what is wanted in a plain sentence, with the user's words as arguments;",
        "  see above how often it is right. It plans nothing, and two calls at once mostly go wrong.",
        "- It is a demonstration and a test object for decoding. Use it for nothing that matters.",
    ]
