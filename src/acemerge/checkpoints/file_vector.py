"""A tensor's entries as they lie in a file, read a piece at a time.

Not mapped: the system need not enter each page in a table and take it out again, and a file that shrinks is an error like any
other, where a page that is gone ends the process.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import MergeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FileVector:
    """In one row, whatever the tensor's shape."""

    def __init__(self, stamp: FileStamp, start: int, header: TensorHeader) -> None:
        import torch

        stamp.check()
        self._stamp, self._start, self._header = stamp, start, header
        self.dtype: torch.dtype = getattr(torch, header.dtype)
        self._file = os.open(stamp.path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            with suppress(OSError):  # what was read was checked
                os.close(self._file)

    def numel(self) -> int:
        """How many entries."""
        return self._header.elements

    def __getitem__(self, where: slice) -> Tensor:
        """A piece, in memory of its own."""
        import torch

        start, stop, _ = where.indices(self.numel())
        piece = torch.empty(stop - start, dtype=self.dtype)
        array: Any = piece.view(torch.uint8).numpy()
        memory = memoryview(array)
        place = self._start + start * self.dtype.itemsize
        while memory:
            count = os.preadv(self._file, [memory], place)
            if not count:
                self._stamp.check()
                raise MergeError(f"{self._stamp.path}: ended while it was being read")
            memory, place = memory[count:], place + count
        return piece

    def will_be_needed(self) -> None:
        """The system may read ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, self._start, self._header.nbytes, os.POSIX_FADV_WILLNEED)
