"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from acemerge.errors import InputError


def check_writable(folder: Path, asked: str) -> None:
    """Refuse early a place where nothing can be written, even if it is to be made first; `asked` is how it was asked for."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise InputError(f"{asked}: {there} is a file, not a folder; give another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{asked}: you may not write to {there}; give another place")


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
