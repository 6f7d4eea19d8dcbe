"""How a method sees a stored tensor, there and back.

A method works on matrices [out, in]. Files store some of them the other way round, and some as one fused matrix, such as q, k and
v one below the other. A view turns the one into the other: `to_method` on the way in, `to_stored` on the way out. What methods of
other shapes see, vectors and convolutions, is what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acemerge.numerics.frame import Factors


@dataclass(frozen=True, kw_only=True)
class View:
    """By default the tensor as it is stored, whole."""

    transposed: bool = False
    """Stored [in, out]."""
    fused: int = 1
    """So many matrices of equal size lie one after another along the output axis; each is merged for itself."""
    block: int | None = None
    """Of a fused matrix, which of its matrices is seen; None: all of them as one."""

    @property
    def orientation(self) -> str:
        """In words."""
        turned = "stored [in, out], merged as [out, in]" if self.transposed else "as stored"
        return turned if self.fused == 1 else f"{turned}, as {self.fused} matrices"

    def apart(self) -> list[View]:
        """A view of each matrix that is merged for itself."""
        if self.fused == 1 or self.block is not None:
            return [self]
        return [replace(self, block=block) for block in range(self.fused)]

    def together(self, blocks: Sequence[Tensor]) -> Tensor:
        """The stored tensor, from what is stored of each of its matrices."""
        return torch.cat(list(blocks), self._output_axis)

    def own(self, stored: Tensor) -> Tensor:
        """What is seen of a stored tensor, still in the stored order."""
        return stored if self.block is None else stored.chunk(self.fused, self._output_axis)[self.block]

    def own_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that."""
        if self.block is None:
            return stored
        return tuple(size // self.fused if axis == self._output_axis else size for axis, size in enumerate(stored))

    def to_method(self, stored: Tensor) -> Tensor:
        """What a method sees of a stored tensor; the same memory."""
        return self._turn(self.own(stored))

    def to_stored(self, merged: Tensor) -> Tensor:
        """What a method made of it, in the stored order."""
        return self._turn(merged)

    def low_rank_to_method(self, stored: Factors) -> Factors:
        """The same for a product of two factors; of a fused matrix, left has the outputs of all its matrices."""
        seen = self._turn_factors(stored)
        return seen if self.block is None else Factors(seen.left.chunk(self.fused)[self.block], seen.right)

    def low_rank_to_stored(self, merged: Factors) -> Factors:
        """The same for a product of two factors."""
        return self._turn_factors(merged)

    @property
    def _output_axis(self) -> int:
        return 1 if self.transposed else 0

    def _turn(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.transposed else tensor

    def _turn_factors(self, factors: Factors) -> Factors:
        return Factors(factors.right.T, factors.left.T) if self.transposed else factors
