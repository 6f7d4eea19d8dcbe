"""What was measured on data, kept on disk: computed once, then read one tensor at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acemerge.cache import CACHE_VARIABLE, cache_folder
from acemerge.checkpoints.formats.registry import WeightsFile, open_file
from acemerge.errors import InputError, MergeError
from acemerge.output.whole_files import replace_file
from acemerge.output.writer import write_tensors
from acemerge.version import __version__

Tensors = dict[str, Tensor]


def kept_file(key: Any) -> Path:
    """Where what depends on all this is kept; the versions of acemerge and torch count too."""
    content = json.dumps([__version__, torch.__version__, key], sort_keys=True)
    return cache_folder() / "statistics" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.safetensors"


def keep(key: Any, compute: Callable[[], Tensors]) -> WeightsFile:
    """What `compute` gives for this key, from the disk if it is there whole, computed and written otherwise."""
    path = kept_file(key)
    found = read_kept(path)
    if found is None:
        write_kept(path, compute())
        found = open_file(path)
    return found


def read_kept(path: Path) -> WeightsFile | None:
    """The file, if it is there and whole."""
    try:
        return open_file(path) if path.is_file() else None
    except InputError:  # damaged: measured again
        return None


def write_kept(path: Path, tensors: Tensors) -> None:
    """The file appears when it is whole."""
    try:
        with replace_file(path) as staged:
            write_tensors(staged, tensors)
    except OSError as error:
        raise MergeError(
            f"{path.parent}: what was measured on data cannot be kept there ({error}). Make room, or set {CACHE_VARIABLE} to "
            "another place, then repeat the command"
        ) from None


@dataclass(frozen=True)
class Measured:
    """By expert and tensor of the base, read when it is asked for."""

    files: Mapping[str, Sequence[WeightsFile]]
    """By the expert's name."""

    def of(self, expert: str, tensor: str) -> Tensor | None:
        """What was measured, memory-mapped; None if the data never came there."""
        for file in self.files[expert]:
            if tensor in file.tensors:
                return file.read(tensor)  # another run may have written the same anew; this one's is still mapped
        return None
