"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(file: Path, *, alone: bool = False) -> Iterator[Path]:
    """A path to write to, which takes the file's name when all is written. A reader sees the old file or the new.

    Processes that write the same file do not meet. If this one is `alone`, what a kill leaves has the same name each time (see
    `staged_name`), and the next run writes over it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(staged_name(file.name) if alone else f"{file.name}.{os.getpid()}.partial")
    try:
        yield staged
        staged.replace(file)
    finally:
        staged.unlink(missing_ok=True)


def staged_name(name: str) -> str:
    """What a file of that name is called until it is whole, if one process alone writes it."""
    return f"{name}.new"
