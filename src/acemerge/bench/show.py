"""How a table looks in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Grid

from acemerge.bench.tables import Table, as_cells


def print_table(table: Table, written: Sequence[Path]) -> None:
    """The numbers, and where they were written."""
    heading, *lines = as_cells(table.rows)
    grid = Grid(box=SIMPLE, title=table.title, title_justify="left", padding=(0, 1, 0, 0))
    for index, name in enumerate(heading):
        grid.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
    for line in lines:
        grid.add_row(*line)
    # A table that does not fit is cut by a narrow terminal, never by a pipe.
    console = Console() if Console().is_terminal else Console(width=240)
    console.print(grid)
    print(f"written: {', '.join(map(str, written))}")
