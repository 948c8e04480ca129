"""The picture of docs/hidden-states.md: the logit lens on the demo model, over one sentence and over 64 stories.

    python -m benchmarks.lens [docs/assets/lens.svg]

The stories are drawn from the demo model with seeds 0 … 63, so that the picture can be made again. The last line is one
JSON object with the numbers of the curves.
"""

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

import onward
from onward.language_model.lens import Lens

SENTENCE = "Once upon a time there was a little girl named Lily. She liked to play"
STORIES, TOKENS = 64, 96
CELL, ROW, LEFT, TOP, CHART = 62, 26, 86, 64, 150
INK, GRID = "#3c4257", "#d5d8e0"


def curves(lm: onward.LanguageModel) -> dict[str, list[float]]:
    """By tap: the mean surprise at the next token in nats, and the share of positions with the model's own choice."""
    surprise, agreement, positions = torch.zeros(7), torch.zeros(7), 0
    for seed in range(STORIES):
        story = lm.generate("Once upon a time", max_new_tokens=TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
        lens = lm.lens([*lm.encode("Once upon a time"), *story.token_ids], top=1)
        surprise -= lens.next_logprobs.sum(1)
        agreement += (lens.top_ids[:, :-1, 0] == lens.top_ids[-1, :-1, 0]).sum(1)
        positions += lens.next_logprobs.shape[1]
    return {"surprise": (surprise / positions).tolist(), "agreement": (agreement / positions).tolist()}


def text(x: float, y: float, content: str, size: int = 12, anchor: str = "middle", colour: str = INK) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def table(lens: Lens) -> list[str]:
    """A cell for each layer and position, with its most likely token; a darker cell means a higher probability."""
    parts = [text(LEFT + at * CELL + CELL / 2, TOP - 12, lens._cell(token)) for at, token in enumerate(lens.token_ids)]
    for number, name in enumerate(reversed(lens.taps)):
        y = TOP + number * ROW
        parts.append(text(LEFT - 8, y + 17, name, anchor="end"))
        ids, logprobs = (each[len(lens.taps) - 1 - number, :, 0] for each in (lens.top_ids, lens.top_logprobs))
        for at, (token, logprob) in enumerate(zip(ids.tolist(), logprobs.exp().tolist(), strict=True)):
            x = LEFT + at * CELL
            fill = f'fill="#2f6fde" fill-opacity="{logprob:.2f}" stroke="{GRID}"'
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{ROW}" {fill}/>')
            parts.append(text(x + CELL / 2, y + 17, lens._cell(token)[:9], 11, colour="#fff" if logprob > 0.6 else INK))
    return parts


def curve(left: float, top: float, width: float, values: Sequence[float], taps: Sequence[str], title: str) -> list[str]:
    """A line over the taps, from 0 to the largest value."""
    high, step = max(values), width / (len(values) - 1)
    points = [(left + at * step, top + CHART * (1 - value / high)) for at, value in enumerate(values)]
    parts = [text(left, top - 14, title, 13, "start")]
    parts.append(f'<path d="M{left} {top} V{top + CHART} H{left + width}" fill="none" stroke="{GRID}"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2f6fde" stroke-width="2"/>')
    for (x, y), value, name in zip(points, values, taps, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#2f6fde"/>')
        above = y - 8 if y > top + 14 else y + 18
        parts.append(text(x + 4, above, f"{value:.2f}", 11, "start"))
        parts.append(text(x, top + CHART + 18, name.removeprefix("layers."), 11))
    return parts


def picture(lens: Lens, numbers: dict[str, list[float]]) -> str:
    width = LEFT + CELL * len(lens.token_ids) + 20
    top = TOP + ROW * len(lens.taps) + 60
    half = (width - LEFT - 100) / 2
    parts = [text(LEFT, 24, "The likeliest next token after each layer; darker is more probable", 14, "start")]
    parts += table(lens)
    titles = {"surprise": "Surprise at the next token, in nats", "agreement": "Share with the model's own choice"}
    for at, (name, title) in enumerate(titles.items()):
        parts += curve(LEFT + at * (half + 70), top, half, numbers[name][1:], lens.taps[1:], f"{title}, after layer …")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + CHART + 34}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/assets/lens.svg")
    lm = onward.load("demo")
    numbers = curves(lm)
    path.write_text(picture(lm.lens(SENTENCE, top=1), numbers), encoding="utf-8")
    print(json.dumps({name: [round(value, 4) for value in values] for name, values in numbers.items()}))


if __name__ == "__main__":
    main()
