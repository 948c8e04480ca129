"""The pages of the documentation, and the blocks of code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """language: as after the fence, "" for none. line: of the page, from 1, where `text` begins.
    follows: whether nothing stands between it and the block before."""

    language: str
    text: str
    line: int
    follows: bool


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    end = 0
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        follows = bool(blocks) and not text[end : match.start()].strip()
        blocks.append(Block(match["language"], match["text"], line, follows))
        end = match.end()
    return blocks


def agrees(output: str, printed: str) -> bool:
    """Whether `output` is what a page prints: any number for a number, anything for "…", lines broken anywhere."""
    words = re.split(r"(\s+|…|\d[\d,]*(?:\.\d+)?)", printed.strip())
    pattern = "".join(_pattern(word) for word in words)
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def _pattern(word: str) -> str:
    if word == "…":
        return ".*?"
    if word.isspace():
        return r"\s+"
    return r"\d[\d,]*(?:\.\d+)?" if word[:1].isdigit() else re.escape(word)
