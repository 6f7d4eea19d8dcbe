"""The tutorial is true: its commands run in the order of the page, and print what the page shows."""

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.figure  # noqa: F401  (as torch: before the forks, not after each)
import pytest

from child import command, in_child

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def steps() -> Iterator[tuple[str, str]]:
    """Every command of the page, with what is shown below it."""
    for block in blocks("console"):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, _, shown = step.partition("\n")
            yield typed, shown


def run(typed: str) -> str:
    """What a command prints, in a process of its own that does not import torch again."""
    program, *arguments = shlex.split(typed)
    if program == "ls":
        return "  ".join(sorted(path.name for path in Path(*arguments).iterdir()))

    def work() -> None:
        if program == "acemerge":
            command(*arguments)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")

    ended = in_child(work)
    assert ended.code == 0, f"{typed}\n{ended.out}{ended.err}"
    return ended.out


def same(shown: str, printed: str) -> bool:
    """The same words in the same order, and numbers that agree as far as two processors agree on what they trained."""
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (shown, printed)]
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    return words[0] == words[1] and all(abs(a - b) <= max(0.05, 0.1 * abs(a)) for a, b in zip(*numbers, strict=True))


def test_the_tutorial_does_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for code in blocks("python"):
        (tmp_path / code.removeprefix("# ").split(":")[0]).write_text(code, encoding="utf-8")
    for typed, shown in steps():
        printed = run(typed)
        assert same(shown, printed), f"{typed}\nshown:\n{shown}\nprinted:\n{printed}"
