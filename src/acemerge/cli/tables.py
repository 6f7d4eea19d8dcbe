"""A console and tables that fit the terminal, or the pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from acemerge.errors import printable


class _PatientConsole(Console):
    def render_str(self, text: str, **how: Any) -> Text:
        """Names are strangers': whatever a terminal would act on is shown instead, and every text is one line."""
        return super().render_str(printable(text), **how)

    def on_broken_pipe(self) -> None:
        """A reader that has seen enough, such as `head`, is no failure."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def new_console() -> Console:
    """As wide as the terminal or COLUMNS; in a pipe without it, as wide as the content needs."""
    console = _console()
    told_how_wide = console.is_terminal or "COLUMNS" in os.environ
    return console if told_how_wide else _console(width=200)


def error_console() -> Console:
    """Standard error's, with lines as long as they are."""
    return _console(stderr=True, soft_wrap=True)


def _console(**settings: Any) -> Console:
    """Text is what it is: `[in, out]` is no markup, `:key:` no emoji."""
    return _PatientConsole(highlight=False, markup=False, emoji=False, **settings)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """With these headings, some of them flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


class TensorName:
    """In a cell: where it does not fit, it goes on behind a dot in the next line, and not in the middle of a word."""

    def __init__(self, name: str) -> None:
        name = self._name = printable(name)
        self._parts = re.findall(r"(?:\{[^}]*\}|[^.{])+\.?|[.{]", name)  # {0..5} stays whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for part in self._parts:
            if len(lines[-1]) + len(part) <= options.max_width:
                lines[-1] += part
            else:
                lines.append(f"  {part}")
        yield Text("\n".join(line for line in lines if line), overflow="fold", no_wrap=False)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(self.narrowest, options.max_width), min(max(len(self._name), 1), options.max_width))

    @property
    def narrowest(self) -> int:
        """As wide as the longest word, where it goes on in the next line."""
        return min(len(self._name), 2 + max(map(len, self._parts), default=0))


def name_cells(table: Table, names: Sequence[str], width: int) -> list[TensorName]:
    """Cells of the first column: a third of the width, and room for the longest word, if that is not too much."""
    cells = [TensorName(name) for name in names]
    narrowest = max((cell.narrowest for cell in cells), default=0)
    if narrowest <= width * 2 / 5:
        table.columns[0].no_wrap = True
        table.columns[0].max_width = max(width // 3, narrowest)
    return cells
