"""What a format of weights files is, and which one a file is in.

A format is one file of this folder, with a FORMAT that says by which names its files go and how one is opened: reading its
header only, and each tensor later, when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.file_vector import FileVector
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.checkpoints.untrusted import check_names, check_not_pointer
from acemerge.discovery import modules_of
from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightsFile:
    """One file: its tensors' headers, and a way to read each lazily."""

    stamp: FileStamp
    tensors: Mapping[str, TensorHeader]
    read: Callable[[str], Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[], Mapping[str, Any]] = dict
    """What config.json would say, of a file that says so itself; asked for where there is none."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Where each tensor's values begin in the file, if that has them as they are, row by row."""
    held: Callable[[str], Tensor] | None = None
    """What the file holds of a tensor whose floats are made when it is read; None: `read` gives the file's own numbers."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.stamp.path

    def __reduce__(self) -> tuple[Callable[..., WeightsFile], tuple[object, ...]]:
        """Another process opens the file itself: no tensor travels."""
        return open_file, (self.path,)

    def read_unchanged(self, tensor: str) -> Tensor:
        """One tensor, of a file that has not changed since it was opened."""
        self.stamp.check()
        return self.read(tensor)

    def vector_unchanged(self, tensor: str) -> FileVector | None:
        """The same to be read a piece at a time, if the file's format allows it."""
        start = self.starts.get(tensor)
        return None if start is None else FileVector(self.stamp, start, self.tensors[tensor])

    def held_unchanged(self, tensor: str) -> Tensor:
        """The same of what the file holds of it."""
        self.stamp.check()
        return (self.held or self.read)(tensor)


@dataclass(frozen=True)
class Format:
    """One format."""

    suffixes: tuple[str, ...]
    """Of its files. The first is also that of shards and adapters."""
    model_file: str
    """What the weights of a whole model are called; shards have an index named after it."""
    open: Callable[[Path], WeightsFile]
    """A file of this format, checked."""
    rank: int
    """Where a model is there in several formats, the lowest is read. A file of an unknown name is tried with the highest."""
    parts: Callable[[Path], list[Path]] = field(default=lambda path: [path])
    """All files of the model that a given file is of."""
    of_hugging_face: bool = True
    """Whether its libraries save models and adapters so. What others save is read where a file or folder is given."""

    def matches(self, path: Path) -> bool:
        """By its name."""
        return path.name.endswith(self.suffixes)


@cache
def formats() -> tuple[Format, ...]:
    """Every format, the preferred one first."""
    found = [module.FORMAT for module in modules_of("acemerge.checkpoints.formats") if hasattr(module, "FORMAT")]
    return tuple(sorted(found, key=lambda each: each.rank))


def weight_suffixes() -> tuple[str, ...]:
    """How names of weights files end."""
    return tuple(suffix for each in formats() for suffix in each.suffixes)


def format_of(path: Path) -> Format:
    """Which one a file is in, by its name."""
    return next((each for each in formats() if each.matches(path)), formats()[-1])


def open_file(path: Path) -> WeightsFile:
    """Open one weights file, whatever its format; reads its header only."""
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read; you lack the permission")
    check_not_pointer(path)
    opened = format_of(path).open(path)
    check_names(path, opened.tensors)
    return opened
