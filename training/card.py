"""The model card: measures the exported models and writes src/onward/demo/README.md."""

from __future__ import annotations

import json
import os
import platform
import textwrap
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
from .first_contact import OPENINGS, TOKENS, TOP_P, stories
from .model import Transformer
from .samples import draw_samples
from .settings import Schedule, Settings
from .tool_calls import right_answers
from .train import Progress

# The bound for float32 sums of a few hundred products in another order, with logits of magnitude up to about 30.
TRANSFORMERS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Trained:
    """One exported model, and the cost of its training."""

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
    evaluation = evaluate(target.model, draft.model, tokenizer, heldout)
    for line in _score_table(evaluation):
        print(line, flush=True)
    checks = _checks(settings, tokenizer.encode(heldout[0][1]).ids[:512])
    for line in checks:
        print(line, flush=True)
    sections = [
        _introduction(),
        _sizes(target, draft, tokenizer),
        _corpus(settings, heldout),
        _training(target, draft, settings),
        ["## Held-out loss", "", _heldout_notes(), "", *_score_table(evaluation)],
        _first_contact(settings, tokenizer),
        tools_section(settings, tokenizer),
        ["## Checks", "", *checks],
        ["## Unedited samples", "", *draw_samples(settings.output / "target", tokenizer, settings.sample_tokens)],
        ["## Limits", "", *map(_wrapped, LIMITS)],
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
    """Compare both folders with transformers, and measure the error of rounding to bfloat16."""
    lines = []
    for name, config in (("target", settings.target), ("draft", settings.draft)):
        folder = settings.output / name
        difference = difference_from_transformers(folder, ids)
        if difference > TRANSFORMERS_TOLERANCE:
            raise RuntimeError(
                f"{folder}: transformers' logits differ by {difference:.2e} (> {TRANSFORMERS_TOLERANCE})"
            )
        trained = Transformer(config)
        trained.load_state_dict(_checkpoint(settings, name)["average"])
        logit, loss = rounding_cost(trained.eval(), folder, ids)
        lines.append(
            _wrapped(
                f"- {name}: logits match transformers' `Qwen3ForCausalLM` within {difference:.1e} (float32, {len(ids)} "
                f"tokens). Rounding the weights to bfloat16 changes a logit by at most {logit:.2f} and the loss by "
                f"{loss:+.4f} nats."
            )
        )
    return lines


def _wrapped(text: str) -> str:
    """Wrap a paragraph or a list item to lines of at most 100 columns."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _row(label: str, *values: object) -> str:
    return f"| {label} | " + " | ".join(map(str, values)) + " |"


def _introduction() -> list[str]:
    return [
        "# The demo model",
        "",
        _wrapped(
            "A very small language model, trained by the Onward project, so that you can try every feature within "
            "seconds of installing. It tells short stories, answers questions about them, copies their facts into "
            "JSON and calls tools, as plain text or as a chat. `target/` is the model; `draft/` is a much smaller "
            "model with the same tokenizer, for speculative decoding. Both use the layout of `Qwen3ForCausalLM` "
            "(bfloat16). `head/` is an EAGLE-3 head of the target, also for speculative decoding."
        ),
        "",
        _wrapped(
            "`python -m training` generates this page. It can rebuild the corpus, the tokenizer and both models, "
            "and `python -m training.train_head` the head. All are the project's own work under the project's license."
        ),
    ]


def _sizes(target: Trained, draft: Trained, tokenizer: Tokenizer) -> list[str]:
    t, d = target.model.config, draft.model.config
    counts = [model.model.parameter_count() for model in (target, draft)]
    return [
        "## Sizes",
        "",
        "| | target | draft |",
        "|---|---|---|",
        _row("parameters (the head shares the embedding)", *(f"{count:,}" for count in counts)),
        _row("model.safetensors, bytes", f"{target.bytes:,}", f"{draft.bytes:,}"),
        _row("layers", t.num_layers, d.num_layers),
        _row("hidden size / MLP size", *(f"{c.hidden_size} / {c.intermediate_size}" for c in (t, d))),
        _row(
            "query heads / KV heads / head_dim", *(f"{c.num_heads} / {c.num_kv_heads} / {c.head_dim}" for c in (t, d))
        ),
        _row("vocabulary", tokenizer.get_vocab_size(), tokenizer.get_vocab_size()),
        _row("context, tokens", t.max_position_embeddings, d.max_position_embeddings),
        "",
        _wrapped(
            f"The draft has {counts[1] / counts[0]:.1%} of the target's parameters. The tokenizer is a byte-level BPE: "
            "any text round-trips, and each digit is one token. Its special tokens are `<|endoftext|>` (BOS, padding "
            "and the end of a document), `<|im_start|>` and `<|im_end|>` (ChatML). `generation_config.json` stops "
            "generation at `<|im_end|>` or `<|endoftext|>`."
        ),
    ]


def _corpus(settings: Settings, heldout: list[tuple[str, str]]) -> list[str]:
    stored = torch.load(settings.work / "corpus.pt", weights_only=True)
    count, documents = len(stored["ids"]), len(stored["prompts"])
    kinds = ", ".join(f"{sum(kind == k for kind, _ in heldout)} {k}" for k in KINDS)
    size = settings.heldout_path.stat().st_size
    return [
        "## Corpus",
        "",
        _wrapped(
            f"{documents:,} documents ({stored['characters'] / 1e6:.1f} M characters, {count:,} tokens) written by a "
            f"seeded grammar (`training/corpus/`, seed {settings.train_seed}); no text comes from anywhere else. The "
            "grammar draws the facts of a story first (two characters with a name, kind, trait and pronouns; an object "
            "and its color; places, weather, food, a feeling) and one of ten plots. Templates then tell the story, and "
            "the questions and extractions follow from the same facts. Many names are assembled from syllables, so "
            "that the model has to copy names instead of memorizing them."
        ),
        "",
        _wrapped(
            f"The held-out text (`training/heldout.txt`, {size:,} bytes; {kinds}) comes from the **same grammar** with "
            f"another seed ({settings.heldout_seed}) and shares no document with the training text. It measures how "
            "well the model has learned the grammar, and says nothing about English in general."
        ),
    ]


def _training(target: Trained, draft: Trained, settings: Settings) -> list[str]:
    pair = (target, draft)
    context = target.model.config.max_position_embeddings
    lines = [
        "## Training",
        "",
        "| | target | draft |",
        "|---|---|---|",
        _row("starts from", *("earlier weights" if m.progress.further else "random weights" for m in pair)),
        _row("tokens in the loss", *(f"{m.progress.trained_tokens:,}" for m in pair)),
        _row("tokens including prompts and padding", *(f"{m.progress.tokens:,}" for m in pair)),
        _row("steps", *(f"{m.progress.step:,}" for m in pair)),
        _row("minutes", *(f"{m.progress.seconds / 60:.1f}" for m in pair)),
        "",
        _wrapped(
            "AdamW (betas 0.9 and 0.95, weight decay 0.1 on matrices), warm-up and linear decay to zero, gradient "
            f"norm clipped at 1, an exponential moving average of the weights (decay {target.schedule.average_decay}), "
            "bfloat16 autocast over float32 weights. Each row is one document of up to "
            f"{context} tokens, so attention never crosses documents. Stories and short answers count in full in the "
            "target's loss, all other text with a probability of "
            f"{target.schedule.text_share:g} per token ({draft.schedule.text_share:g} for the draft), and prompts not "
            "at all. Only stories follow a bare BOS."
        ),
        "",
        _wrapped(f"Hardware: {_cpu()}, {settings.threads} threads, torch {torch.__version__}, shared with other work."),
    ]
    if target.progress.further:
        lines += ["", _wrapped("`training/README.md` describes the runs that led to the earlier weights.")]
    return lines


def _first_contact(settings: Settings, tokenizer: Tokenizer) -> list[str]:
    counts = stories(settings.output / "target", tokenizer, settings.opening_seeds)
    quoted = ", ".join("an empty prompt" if not opening else f'"{opening}"' for opening in OPENINGS)
    return [
        "## First contact",
        "",
        _wrapped(
            "The model is trained to continue any plain prompt with a story. The table counts continuations of "
            f"{TOKENS} tokens (top_p {TOP_P}) that are part of a story and contain no fragment of a chat, a tool, a "
            f"question, JSON or a note, for {len(OPENINGS)} prompts: {quoted}."
        ),
        "",
        "| temperature | stories | continuations |",
        "|---|---|---|",
        *(_row("greedy" if heat == 0 else f"{heat:g}", told, drawn) for heat, (told, drawn) in counts.items()),
    ]


def tools_section(settings: Settings, tokenizer: Tokenizer) -> list[str]:
    """The share of correct answers in conversations with tools, drawn with the held-out seed."""
    conversations = tool_chats(settings.heldout_seed, settings.tool_conversations)
    answers = right_answers(settings.output / "target", tokenizer, conversations)
    kinds = {
        "call": "one call with exactly the requested name and arguments",
        "calls": "two calls in one answer, likewise",
        "result": "a tool's result, reported word for word",
        "talk": "an answer that needs no tool, without a call",
    }
    return [
        "## Tools",
        "",
        _wrapped(
            f"Greedy answers in {settings.tool_conversations} conversations with tools, from a seed that was never "
            "trained on. The answers are free text here; a call forced with `tool_choice` is always valid, because a "
            "grammar constrains it."
        ),
        "",
        "| expected | correct | total |",
        "|---|---|---|",
        *(_row(kinds[kind], right, asked) for kind, (right, asked) in answers.items()),
    ]


def _cpu() -> str:
    """The processor's name, from /proc/cpuinfo if it exists."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()


def _heldout_notes() -> str:
    return _wrapped(
        "Loss in nats per token, with the bfloat16 weights computed in float32. All tokens count, including the "
        "users' turns. Much of the remaining loss is the grammar's free choice (names, colors, the plot), which no "
        "model can predict. `same argmax` is the share of positions where draft and target choose the same token "
        "given the true text, which is the acceptance rate of one greedy draft token."
    )


def _score_table(evaluation: Evaluation) -> list[str]:
    def cells(score: KindScore) -> str:
        return f"{score.loss:.4f} | {score.perplexity:.3f}"

    lines = [
        "| kind | documents | tokens | target loss | perplexity | draft loss | perplexity | same argmax |",
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
        f"On average, the first {evaluation.accepted_in_a_row:.2f} of 4 draft tokens match the target.",
        f"The target's greedy answers are correct word for word for {_right(evaluation)}.",
    ]


def _right(evaluation: Evaluation) -> str:
    counts = evaluation.right_answers.items()
    return ", ".join(f"{right} of {total} {what}" for what, (right, total) in counts)


LIMITS = (
    "- It knows nothing about the world: no facts, no arithmetic, no code, no language but simple English. When you "
    "ask for such things in a chat, it mostly says so in sentences that it has learned by heart; an unusual request "
    "may get a story, or an answer that makes no sense.",
    "- It knows ten plots and a few hundred words. A story about anything else falls back on them.",
    "- It knows the questions and JSON keys of its grammar only (name, kind, trait, friend, friend_kind, object, "
    "color, place, food, weather, feeling, home, problem; in notes also count, item, day, age, city, hour). A question "
    "in other words may get the answer to another question, and long invented names are sometimes copied wrongly.",
    "- It works best on text like its own: short, plain sentences. It does not understand an arbitrary article.",
    "- A story has two characters, a chat at most a few stories, and a chat ends when the context is full.",
    "- The tables above measure how often its answers are correct on text from its own grammar. Elsewhere they are "
    "correct less often.",
    "- It calls tools when a user asks in a plain sentence, with words of that sentence as arguments. It plans "
    "nothing, and two calls in one answer mostly go wrong.",
    "- It is a demonstration and a test object for decoding. Do not use it for anything that matters.",
)
