"""What a model card's front matter says, as far as it is of use here. It may be anybody's, so only plain lines are read."""

from __future__ import annotations

import re
from pathlib import Path

_FRONT_MATTER = 50_000  # characters of a card in which its front matter must end
_WORD = r"['\"]?([\w.@/-]+)['\"]?"


def licence(folder: Path) -> str | None:
    """The licence that it names."""
    found = re.search(r"^license:\s*([\w.-]+)\s*$", _front_matter(folder), re.MULTILINE)
    return found[1] if found else None


def base_models(folder: Path) -> list[str]:
    """The models that it says this one was made from: one, or a list."""
    front = _front_matter(folder)
    one = re.search(rf"^base_model:[ \t]*{_WORD}[ \t]*$", front, re.MULTILINE)
    several = re.search(r"^base_model:[ \t]*\n((?:[ \t]*-[ \t]+\S+[ \t]*\n)+)", front + "\n", re.MULTILINE)
    lines = several[1].splitlines() if several else []
    listed = [match[1] for line in lines if (match := re.fullmatch(rf"[ \t]*-[ \t]+{_WORD}[ \t]*", line))]
    return [one[1]] if one else listed


def _front_matter(folder: Path) -> str:
    card = folder / "README.md"
    if not card.is_file():
        return ""
    with card.open(encoding="utf-8", errors="replace") as file:
        front = re.match(r"---\n(.*?)\n---", file.read(_FRONT_MATTER), re.DOTALL)
    return front[1] if front else ""
