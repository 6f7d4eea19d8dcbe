"""A console and tables that fit the terminal, or the pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


class _PatientConsole(Console):
    def on_broken_pipe(self) -> None:
        """A reader that has seen enough, such as `head`, is no failure."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def new_console() -> Console:
    """As wide as the terminal or COLUMNS; in a pipe without it, as wide as the content needs. `[in, out]` is no markup."""
    console = _PatientConsole(highlight=False, markup=False, soft_wrap=False)
    told_how_wide = console.is_terminal or "COLUMNS" in os.environ
    return console if told_how_wide else _PatientConsole(highlight=False, markup=False, width=200)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """With these headings, some of them flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
