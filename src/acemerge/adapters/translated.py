"""A file of another trainer's factors, seen as the file that peft would have saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from acemerge.checkpoints.formats.registry import WeightsFile
from acemerge.checkpoints.tensor_header import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file itself."""

    key: str
    transposed: bool = False


@dataclass(frozen=True)
class Translated(WeightsFile):
    """The file under peft's names, with factors turned to peft's order as they are read."""

    original: WeightsFile | None = None
    keys: Mapping[str, Stored] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., WeightsFile], tuple[object, ...]]:
        """Another process opens the file itself, and translates it again."""
        return translated, (self.original, self.keys)


def translated(original: WeightsFile, keys: Mapping[str, Stored]) -> Translated:
    """The file's tensors by peft's names."""

    def read(name: str) -> Tensor:
        tensor = original.read(keys[name].key)
        return tensor.T if keys[name].transposed else tensor

    headers = {}
    for name, stored in keys.items():
        header = original.tensors[stored.key]
        headers[name] = TensorHeader(header.dtype, header.shape[::-1]) if stored.transposed else header
    return Translated(original.stamp, headers, read, original=original, keys=keys)
