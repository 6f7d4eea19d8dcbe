"""What a quantised model is for those who read one, and what they say of each weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.tensor_header import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

ORIGINAL = "Give the float model that it was made from"
"""What to do where nothing else helps."""
_NUMBERS_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class StoredModel:
    """What its files hold."""

    settings: Mapping[str, Any]
    """How it was quantised, as config.json says."""
    tensors: Mapping[str, TensorHeader]
    read: Callable[[str], Tensor]
    dtype: str
    """Of the floats, if the way does not say otherwise."""
    where: str
    """How messages name it."""
    turned: Callable[[str], bool]
    """Whether a float weight of this name is a matrix stored [in, out]; ways to quantise take all as [out, in]."""


@dataclass(frozen=True)
class FloatWeight:
    """A float tensor, and the stored ones that it is made of."""

    name: str
    header: TensorHeader
    parts: tuple[str, ...]
    floats: Callable[..., Tensor]
    """From the parts, in their order."""
    block: tuple[int, int] | None = None
    """Of numbers of 8 bits: what has one scale, if it is neither a row nor the whole."""

    def turned(self) -> FloatWeight:
        """The same weight the other way round, if it is a matrix."""
        if len(self.header.shape) != 2:
            return self
        rows, columns = self.header.shape
        header = TensorHeader(self.header.dtype, (columns, rows), made=True)
        return replace(self, header=header, floats=lambda *parts: self.floats(*parts).T.contiguous())


def rows_at_once(columns: int, multiple: int = 1) -> int:
    """Of a matrix, so that what they are made by stays small."""
    return max(1, _NUMBERS_AT_ONCE // max(1, columns) // multiple) * multiple


def whole_number(value: object) -> int | None:
    """A positive whole number from somebody's JSON, or nothing."""
    return value if type(value) is int and value > 0 else None
