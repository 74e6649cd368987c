"""The fenced blocks of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```(?P<language>\w*)(?: (?P<path>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block; *path* is the file it is, where it says so behind its language."""

    language: str
    path: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(match["language"], match["path"] or "", match["text"]) for match in _FENCE.finditer(text)]
