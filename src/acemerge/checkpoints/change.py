"""A tensor given as a change of the base's: what a checkpoint needs to know of it. `adapters` has the kinds there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Change(Protocol):
    """How an adapter changes one tensor of the base."""

    @property
    def read(self) -> Callable[[str], Tensor]:
        """One of the tensors that it is made of, by its name in the file."""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the file."""

    def expand(self, base: Tensor) -> Tensor:
        """The change of the tensor as stored, given the base's."""
