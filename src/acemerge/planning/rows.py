"""Tensors with a row for every token, lined up by token.

An expert's rows are put in the base's order when they are read, so that methods see the rows of the same tokens (`LinedUp`). What
comes out has the base's rows; the output may have others, in another order (`OutputRows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acemerge.checkpoints.tensor_header import TensorHeader

NOWHERE = -1
"""In the place of a row's number: there is no such row."""


@dataclass(frozen=True, eq=False)
class LinedUp:
    """Where an expert keeps the rows that the base has."""

    theirs: Tensor
    """For each row of the base, the expert's row; or NOWHERE, and the expert counts as one that did not change it."""
    axis: int = 0

    def shape(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """Of the expert's tensor in the base's order."""
        return _with_rows(theirs, self.axis, len(self.theirs))

    def to_base_order(self, theirs: Tensor, base: Tensor) -> Tensor:
        """The expert's tensor in the order of the base's, whose own rows stand in for those that the expert lacks."""
        lined = theirs.index_select(self.axis, self.theirs.clamp(min=0)).to(torch.promote_types(theirs.dtype, base.dtype))
        lacking = (self.theirs == NOWHERE).nonzero().flatten()
        return lined.index_copy_(self.axis, lacking, base.index_select(self.axis, lacking).to(lined.dtype))


@dataclass(frozen=True, eq=False)
class TakenRows:
    """Rows that one model gives to rows of the output."""

    expert: int | None
    """None: the base."""
    name: str
    """Of the tensor there."""
    rows: Tensor
    """There."""
    to: Tensor
    """The row of the output that each goes to; where several models give one, it is their mean."""


@dataclass(frozen=True, eq=False)
class OutputRows:
    """The rows of the output: those of the merged tensor, in the output's order, and those of tokens that the base lacks."""

    merged: Tensor
    """For each row of the output, the row of what was merged; or NOWHERE."""
    taken: tuple[TakenRows, ...]
    """What is not merged, but taken as it is from the models that have it."""
    zero: Tensor
    """Rows of the output that are zero, as asked."""
    axis: int = 0

    def shape(self, merged: tuple[int, ...]) -> tuple[int, ...]:
        """Of the output's tensor."""
        return _with_rows(merged, self.axis, len(self.merged))

    def header(self, merged: TensorHeader) -> TensorHeader:
        """The same with its dtype."""
        return replace(merged, shape=self.shape(merged.shape))

    @property
    def new(self) -> Tensor:
        """Rows of the output that are not merged."""
        return (self.merged == NOWHERE).nonzero().flatten()

    @property
    def unfounded(self) -> Tensor:
        """Rows that no model has: padding, or tokens whose models have no rows for them. They become the mean of all rows."""
        founded = torch.cat([self.zero, *(taken.to for taken in self.taken)])
        return self.new[~torch.isin(self.new, founded)]


def as_rows(numbers: Sequence[int]) -> Tensor:
    """Numbers of rows."""
    return torch.tensor(numbers, dtype=torch.int64)


def _with_rows(shape: tuple[int, ...], axis: int, rows: int) -> tuple[int, ...]:
    return (*shape[:axis], rows, *shape[axis + 1 :])
