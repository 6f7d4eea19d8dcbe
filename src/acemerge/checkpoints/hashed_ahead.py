"""Hashes of models' files that are begun before anything else, while Python imports torch: that takes one core a second.

What was found holds for a file as its stamp then said it was; of a file that has another one by now, nothing is known ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from acemerge.checkpoints.content_hash import file_hash, name_in_hub_cache
from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.folder import weight_files
from acemerge.errors import AcemergeError

_begun: dict[FileStamp, Future[str]] = {}


@contextmanager
def hashing_ahead(models: Iterable[Path]) -> Iterator[None]:
    """Hash these models' files one after the other, in a thread, until the block ends. Who opens them tells what is wrong."""
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        for file in _files(models):
            _begun[FileStamp.of(file)] = pool.submit(file_hash, file, stopped=stop.is_set)
        try:
            yield
        finally:
            stop.set()
            _begun.clear()
            pool.shutdown(cancel_futures=True)


def hashed_ahead(file: Path) -> str | None:
    """The BLAKE3 hash of a file, if it was begun ahead; whoever asks for one whose turn has not come yet has it for himself."""
    begun = _begun.get(FileStamp.of(file))
    return None if begun is None or begun.cancel() else begun.result()


def _files(models: Iterable[Path]) -> Iterator[Path]:
    """Of those whose names do not tell their hashes already."""
    for model in models:
        with suppress(AcemergeError, OSError):
            yield from (file for file in weight_files(model) if name_in_hub_cache(file) is None)
