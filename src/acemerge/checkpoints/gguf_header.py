"""The header of a GGUF file: what it says of the model, and where its tensors lie.

A magic, a version and two counts, then names with values, then one entry for each tensor. It is read here and not by the library
`gguf`, which makes an array of every token of the vocabulary (seconds for one file) and follows any count that a file claims.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from acemerge.checkpoints.untrusted import MAX_NAME_LENGTH
from acemerge.errors import InputError

_Entry = TypeVar("_Entry")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_KEPT = 1024  # of an array; the vocabulary is only counted
_LONGEST_TEXT = 1_000_000  # a chat template, say
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies."""

    path: Path
    quantisation: int
    """The library's GGMLQuantizationType."""
    shape: tuple[int, ...]
    """As torch has it: the file's is the other way round."""
    start: int
    """In the file."""


@dataclass(frozen=True)
class GgufHeader:
    """What a file says before its numbers."""

    path: Path
    metadata: dict[str, Any]
    """Long arrays, such as the vocabulary, are only their length."""
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Of a whole file, or an error that names it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header()
    except (ValueError, OSError, struct.error) as error:  # an empty file cannot be mapped
        raise InputError(f"{path}: not a whole GGUF file ({error}). Download it again.") from None


class _Reader:
    """Goes through the header once. A count that the file is too short for ends at its end: every entry takes some bytes."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at = path, content, 0

    def header(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self._scalar("I")) not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}; big-endian files are not read")
        of_tensors, of_values = self._scalar("Q"), self._scalar("Q")
        metadata = self._entries(of_values, lambda: self._value(self._scalar("I")))
        tensors = self._entries(of_tensors, self._tensor)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r}")
        data = -(-self.at // alignment) * alignment
        return GgufHeader(self.path, metadata, {name: replace(each, start=data + each.start) for name, each in tensors.items()})

    def _entries(self, count: int, read: Callable[[], _Entry]) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        for _ in range(count):
            name = self._take(self._scalar("Q"), MAX_NAME_LENGTH).decode()
            if name in found:
                raise ValueError(f"the name {name!a} is there twice")
            found[name] = read()
        return found

    def _tensor(self) -> GgufTensor:
        dimensions = self._scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return GgufTensor(self.path, self._scalar("I"), shape[::-1], self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._take(self._scalar("Q")).decode(errors="replace")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value of unknown kind {kind}")
        inner, length = self._scalar("I"), self._scalar("Q")
        if inner != _STRING and inner not in _SCALARS:
            raise ValueError(f"an array of kind {inner}")
        if length <= _LONGEST_KEPT:
            return [self._value(inner) for _ in range(length)]
        if inner == _STRING:
            for _ in range(length):
                self._skip(self._scalar("Q"))
        else:
            self._skip(length * struct.calcsize(_SCALARS[inner]))
        return length

    def _scalar(self, kind: str) -> Any:
        start, self.at = self.at, self.at + struct.calcsize(kind)
        return struct.unpack_from(f"<{kind}", self.content, start)[0]

    def _take(self, length: int, at_most: int = _LONGEST_TEXT) -> bytes:
        if length > at_most:
            raise ValueError(f"a text of {length} bytes")
        self._skip(length)
        return self.content[self.at - length : self.at]

    def _skip(self, length: int) -> None:
        self.at += length
        if self.at > len(self.content):
            raise ValueError("it ends too early")
