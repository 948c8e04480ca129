"""The report as a picture: bars and the limit. Plain SVG, so that it needs no packages."""

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.compare.contenders import OURS
from benchmarks.compare.report import FIGURES, PrecisionReport, words

LEFT, PANEL, GAP, BAR, STEP, TOP = 156, 192, 26, 15, 21, 92
ROOM_INSIDE = 44  # a bar at least so wide carries its figure inside
WIDTH = LEFT + len(FIGURES) * (PANEL + GAP) + 18
INK, FAINT, OURS_COLOUR, PEER_COLOUR, LIMIT_COLOUR = "#1c2733", "#66727f", "#d9480f", "#9fb3c8", "#1c2733"
STYLE = (
    "text{font-family:-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:" + INK + "}"
    ".title{font-size:17px;font-weight:600}.faint{fill:" + FAINT + "}.head{font-size:13px;font-weight:600}"
    ".ours{font-weight:600}.end{text-anchor:end}.inside{fill:#ffffff}"
)


def picture(reports: Sequence[PrecisionReport], machine: str) -> str:
    """An SVG document: a row of panels for each precision, a panel for each figure, a bar for each contender."""
    parts, y = [], TOP
    for report in reports:
        parts += _precision(report, y)
        y += 40 + STEP * len(report.figures) + 14
    height = y + 6
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>Onward compared with its peers on {escape(machine)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            _text(18, 30, "Tokens per second, Qwen3-0.6B shape, batch 1", "title"),
            _text(18, 50, f"{machine}. Random weights, interleaved runs, medians. Higher is better.", "faint"),
            _limit_line(24, 60, 12),
            _text(
                32,
                70,
                "limit: memory bandwidth in the same run, weights and KV cache read once per token. "
                "1.2x: over the best peer",
                "faint",
            ),
            *parts,
            "</svg>\n",
        ]
    )


def _precision(report: PrecisionReport, top: int) -> Iterator[str]:
    yield _text(18, top + 16, report.precision, "title")
    for column, figure in enumerate(FIGURES):
        yield from _panel(report, figure, LEFT + column * (PANEL + GAP), top)
    for row, name in enumerate(report.figures):
        y = top + 40 + row * STEP + 12
        yield _text(LEFT - 8, y, name, "end ours" if name.startswith(OURS) else "end")


def _panel(report: PrecisionReport, figure: str, left: int, top: int) -> Iterator[str]:
    rates = {name: rates[figure] for name, rates in report.figures.items()}
    limit = report.limits.get(figure)
    scale = (PANEL - 8) / max([limit or 0, *(rate or 0 for rate in rates.values())], default=1)
    yield _text(left, top + 16, words(figure), "head")
    ratio = report.ratio(figure)
    if ratio is not None:
        yield _text(left + PANEL, top + 16, f"{ratio:.2f}x", "end ours")
    for row, (name, rate) in enumerate(rates.items()):
        y = top + 40 + row * STEP
        colour = OURS_COLOUR if name.startswith(OURS) else PEER_COLOUR
        width = (rate or 0) * scale
        yield f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>'
        label = "-" if not rate else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
        ours = "inside ours" if name.startswith(OURS) else ""
        if width >= ROOM_INSIDE:
            yield _text(left + width - 5, y + 12, label, f"end {ours}")
        else:
            yield _text(left + width + 5, y + 12, label)
    if limit:
        x = left + limit * scale
        yield _limit_line(x, top + 34, STEP * len(rates) + 4)
        yield _text(x, top + 31, f"{limit:,.0f}", "faint end")


def _limit_line(x: float, y: float, length: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + length}" stroke="{LIMIT_COLOUR}" '
        'stroke-width="1.5" stroke-dasharray="4 3"/>'
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'
