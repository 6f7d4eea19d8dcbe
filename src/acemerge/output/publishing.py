"""Putting a finished folder in its place: by one rename, or by one exchange where it replaces an earlier output.

A kill at any moment leaves the old output, the new one, or (where the file system cannot exchange two folders, between two
renames) neither, with the old one beside under `<output>.replaced`, which the next run puts back.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from acemerge.errors import InputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_occupied(output: Path) -> bool:
    """Whether something is in the output's place; an empty folder is as good as nothing."""
    return output.exists() and not (output.is_dir() and not any(output.iterdir()))


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Only one process at a time works on an output. The lock file lies beside it, so that no run's folder ever holds it.

    The system holds the lock for the process, so that a killed one's is gone, and only its empty file stays until the next run.
    """
    path = output.with_name(output.name + ".partial.lock")
    if os.path.lexists(path) and not _is_empty_file(path):
        raise InputError(f"{path}: needed as a lock for {output.name}, but it is not acemerge's; move it away")
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(f"{output}: another acemerge process is writing it; wait for it, or choose another output") from None
    try:
        yield
    finally:
        with suppress(OSError):  # the next run takes what is left
            path.unlink()  # while it is ours: whoever has opened it meanwhile sees that it is gone, and starts over
        lock.release()


def _is_empty_file(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink() and path.stat().st_size == 0
    except FileNotFoundError:  # its run has just ended
        return True


def publish(folder: Path, output: Path) -> Path | None:
    """Move a finished folder, whose files are on the disk, to its place; where the earlier output is now, if there was one."""
    _flush_to_disk(folder)
    earlier = None
    if not is_occupied(output):
        folder.rename(output)
    elif exchange(folder, output):
        earlier = folder
    else:
        earlier = replaced_folder(output)
        output.rename(earlier)
        folder.rename(output)
    return earlier


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def remove(folder: Path, marker: str) -> None:
    """Delete a folder; `marker`, by which a later run knows it as one to delete, is put in first and goes last."""
    (folder / marker).touch()
    for path in folder.iterdir():
        if path.name != marker:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def replaced_folder(output: Path) -> Path:
    """Where an earlier output is between the two renames."""
    return output.with_name(output.name + ".replaced")


def _flush_to_disk(folder: Path) -> None:
    """So that after a power failure the published files hold what was written."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path.is_dir():
            flush(path)


def flush(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
