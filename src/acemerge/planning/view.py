"""How a method sees a stored tensor, there and back.

A method works on matrices [out, in]. Files store some of them the other way round; some as one fused matrix, such as q, k and v
in one; and a mixture's experts as one stack. A view turns the one into the other: `to_method` on the way in, `to_stored` on the
way out. What methods of other shapes see, vectors and convolutions, is what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from acemerge.checkpoints.fused import Fused
from acemerge.numerics.frame import Factors


@dataclass(frozen=True, kw_only=True)
class View:
    """By default the tensor as it is stored, whole."""

    transposed: bool = False
    """Stored [in, out]."""
    stacked: int = 0
    """So many matrices lie behind each other along the first of three axes; each is merged for itself."""
    fused: Fused | None = None
    """Several matrices share the output axis; each is merged for itself."""
    block: int | None = None
    """Of those that are merged for themselves, which is seen; None: all of them as one."""

    @property
    def orientation(self) -> str:
        """In words."""
        turned = "stored [in, out], merged as [out, in]" if self.transposed else "as stored"
        told = f"{self.stacked} matrices, each {turned}" if self.stacked else turned
        return f"{told}, {self.fused}" if self.fused else told

    def apart(self) -> list[View]:
        """A view of each matrix that is merged for itself."""
        if not self.is_apart:
            return [self]
        return [replace(self, block=block) for block in range(max(1, self.stacked) * self._parts)]

    @property
    def is_apart(self) -> bool:
        """Whether it holds matrices that are merged for themselves."""
        return self.block is None and (self.stacked > 0 or self.fused is not None)

    @property
    def matrix(self) -> int | None:
        """Of a stack, which matrix is seen, or a part of which."""
        return self.block // self._parts if self.stacked and self.block is not None else None

    @property
    def within_matrix(self) -> View:
        """The view of that matrix, if it is there without the others."""
        return replace(self, stacked=0, block=self._part if self.fused else None)

    def own(self, stored: Tensor) -> Tensor:
        """What is seen of a stored tensor, still in the stored order; the same memory, unless it lies in turns with others."""
        if self.block is None:
            return stored
        place = self._place(stored)
        return place.flatten(self._output_axis, self._output_axis + 1) if self.fused else place

    def own_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that."""
        if self.block is None:
            return stored
        shape = list(stored[1:] if self.stacked else stored)
        if self.fused:
            shape[self._output_axis] = self.fused.repeats * self.fused.parts[self._part]
        return tuple(shape)

    def put(self, own: Tensor, stored: Tensor) -> None:
        """Write what is seen, in the stored order, to its place in a stored tensor."""
        place = self._place(stored)
        place.copy_(own.reshape(place.shape))

    def to_method(self, stored: Tensor) -> Tensor:
        """What a method sees of a stored tensor."""
        return self._turn(self.own(stored))

    def to_stored(self, merged: Tensor) -> Tensor:
        """What a method made of it, in the stored order."""
        return self._turn(merged)

    def low_rank_to_method(self, stored: Factors) -> Factors:
        """The same for a product of two factors; of a fused matrix, left has the outputs of all its matrices."""
        seen = self._turn_factors(stored)
        if self.block is None or self.fused is None:
            return seen
        return Factors(self._outputs_of_part(seen.left, 0).flatten(0, 1), seen.right)

    def low_rank_to_stored(self, merged: Factors) -> Factors:
        """The same for a product of two factors."""
        return self._turn_factors(merged)

    @property
    def _parts(self) -> int:
        return len(self.fused.parts) if self.fused else 1

    @property
    def _part(self) -> int:
        return (self.block or 0) % self._parts

    def _place(self, stored: Tensor) -> Tensor:
        """The memory of what is seen; of a fused matrix, its output axis in two: by turns."""
        matrix = stored if self.matrix is None else stored[self.matrix]
        return self._outputs_of_part(matrix, self._output_axis)

    def _outputs_of_part(self, matrix: Tensor, axis: int) -> Tensor:
        if self.fused is None:
            return matrix
        turns: Tensor = matrix.unflatten(axis, (self.fused.repeats, sum(self.fused.parts)))
        return turns.narrow(axis + 1, sum(self.fused.parts[: self._part]), self.fused.parts[self._part])

    @property
    def _output_axis(self) -> int:
        return 1 if self.transposed else 0

    def _turn(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.transposed else tensor

    def _turn_factors(self, factors: Factors) -> Factors:
        return Factors(factors.right.T, factors.left.T) if self.transposed else factors
