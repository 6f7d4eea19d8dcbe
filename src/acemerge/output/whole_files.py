"""Files, and folders, that are there whole or not at all.

They are written under another name. One process at a time has that name: the system holds a lock for it, so that a killed one's
is gone, and what it left is written over by the next.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from acemerge.errors import InputError


def check_writable(folder: Path, asked: str) -> None:
    """Refuse early a place where nothing can be written, even if it is to be made first; `asked` is how it was asked for."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise InputError(f"{asked}: {there} is a file, not a folder; give another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{asked}: you may not write to {there}; give another place")


def staged_name(name: str) -> str:
    """What something of that name is called until it is whole."""
    return f"{name}.acemerge-partial"


@contextmanager
def replace_files(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Paths to write to, which take these files' names when all are written; if that fails, none does, and no folder is made.

    A reader sees the old file or the new.
    """
    with ExitStack() as made:
        for folder in dict.fromkeys(file.parent for file in files):
            made.enter_context(_folder(folder))
        staged = [made.enter_context(_taken(file.with_name(staged_name(file.name)))) for file in files]
        yield staged
        for path, file in zip(staged, files, strict=True):
            path.replace(file)


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """The same for one file."""
    with replace_files([file]) as [staged]:
        yield staged


def write_files(contents: Mapping[Path, str | bytes]) -> None:
    """All of these files, or none of them."""
    with replace_files([*contents]) as staged:
        for path, content in zip(staged, contents.values(), strict=True):
            path.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes this name when all is written. An earlier one of that name is removed first."""
    with _folder(folder.parent), _taken(folder.with_name(staged_name(folder.name)), folder=True) as staged:
        for left in staged.iterdir():
            _remove(left)
        yield staged
        shutil.rmtree(folder, ignore_errors=True)
        staged.replace(folder)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """That it is there; folders made for what then fails are removed."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):  # somebody else has put something there
                place.rmdir()
        raise


@contextmanager
def _taken(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A file, or a folder, that only this process writes to until it gets another name or, if that fails, is removed."""
    descriptor = _take(path, folder)
    try:
        yield path
    except BaseException:
        with suppress(OSError):  # what made it fail may make this fail
            _remove(path)
        raise
    finally:
        os.close(descriptor)


def _take(path: Path, folder: bool) -> int:
    """Wait until no other process has it. If that one has given it another name meanwhile, it is made anew."""
    while True:
        if folder:
            path.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
