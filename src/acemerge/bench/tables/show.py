"""How tables look in a terminal, and where they are written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Grid

from acemerge.bench.tables.tables import Table, as_cells, as_markdown, as_normalised_cells
from acemerge.errors import AcemergeError
from acemerge.output.whole_files import write_files


def publish_table(table: Table, folder: Path, name: str) -> None:
    """Write it as JSON, Markdown and CSV, and print it."""
    files = write(folder, name, {"json": table.to_json(), "md": table.to_markdown(), "csv": table.to_csv()})
    print_grid(table.title, as_cells(table.rows, table.others))
    if table.normalised:
        print_grid(f"{table.title}, in percent of the expert's score", as_normalised_cells(table.rows, table.others))
    _tell(files)


def publish_grids(title: str, grids: Sequence[Sequence[Sequence[str]]], records: Any, folder: Path, name: str) -> None:
    """Write tables of any kind as Markdown, with all that was measured as JSON, and print them."""
    markdown = "\n\n".join([f"# {title}", *map(as_markdown, grids)]) + "\n"
    files = write(folder, name, {"json": json.dumps(records, indent=1) + "\n", "md": markdown})
    for cells in grids:
        print_grid(title, cells)
    _tell(files)


def print_grid(title: str, cells: Sequence[Sequence[str]]) -> None:
    """A heading and lines."""
    heading, *lines = cells
    grid = Grid(box=SIMPLE, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for index, name in enumerate(heading):
        grid.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
    for line in lines:
        grid.add_row(*line)
    # A narrow terminal, or COLUMNS, may fold a table; a pipe or a file does not by itself.
    width = None if Console().is_terminal or "COLUMNS" in os.environ else 240
    console = Console(width=width, markup=False, emoji=False)
    console.print(grid)


def write(folder: Path, name: str, texts: dict[str, str]) -> list[Path]:
    """One file for each ending: all of them, or none."""
    files = {folder / f"{name}.{ending}": text for ending, text in texts.items()}
    try:
        write_files(files)
    except OSError as error:
        raise AcemergeError(
            f"-o {folder}: cannot be written ({error.strerror}), and nothing was; make room or choose another place, then repeat "
            "the command: what was measured is kept"
        ) from None
    return [*files]


def _tell(files: Sequence[Path]) -> None:
    print("written:", ", ".join(map(str, files)))
