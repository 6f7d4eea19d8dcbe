"""How an adapter changes one tensor of the base.

LoRA changes the matrix W (out x in) of a module by s B A, with s = alpha / r, or alpha / sqrt(r) for rsLoRA. Conv1D modules and
embeddings store W^T, so they store (s B A)^T. DoRA then rescales each row of W + s B A to a length of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from acemerge.numerics.frame import Factors

_ROUNDING = 2.0**-20  # of a row's length in float32


@dataclass(frozen=True)
class Place:
    """Where peft keeps the factors of a tensor's change."""

    module: str
    """The module's name in the model that the adapter belongs to."""
    shape: tuple[int, ...]
    """Of the tensor as stored; a convolution's has more than two axes, and its W is out x everything else."""
    stored_in_out: bool
    """Whether the tensor is stored as W^T."""
    is_embedding: bool = False

    def from_factors(self, stored: Factors) -> tuple[Tensor, Tensor]:
        """A and B, with s = 1, of a change of the tensor in the order in which it is stored."""
        return (stored.left.T, stored.right.T) if self.stored_in_out else (stored.right, stored.left)


@dataclass(frozen=True)
class LoraChange:
    """How an adapter changes one tensor of the base."""

    read: Callable[[str], Tensor]
    down: str
    """The name of A, r x in."""
    up: str
    """The name of B, out x r."""
    scale: float
    rank: int
    stored_in_out: bool
    """Whether the tensor is stored as W^T."""
    shape: tuple[int, ...]
    """Of the tensor as stored; a convolution's has more than two axes, and its W is out x everything else."""
    module: str
    """The module's name in the model that the adapter was trained on."""
    is_embedding: bool
    magnitude: str | None = None
    """The name of DoRA's row lengths."""
    of_parameter: bool = False
    """Whether it changes a parameter of a module that is no linear layer, so that an adapter of modules has no place for it."""

    @property
    def is_low_rank(self) -> bool:
        """Whether it is s B A and no more."""
        return self.magnitude is None

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the adapter's file."""
        return tuple(name for name in (self.down, self.up, self.magnitude) if name)

    def factors(self) -> Factors:
        """s B A as a product in the order in which the tensor is stored, in float32 (float64 if its factors are stored so)."""
        from acemerge.numerics.frame import Factors

        A, B = self._scaled()
        return Factors(A.T, B.T) if self.stored_in_out else Factors(B, A)

    def _scaled(self) -> tuple[Tensor, Tensor]:
        """A and s B."""
        A, B = (at_least_float32(self.read(name)).flatten(1) for name in (self.down, self.up))
        return A, B * self.scale

    @property
    def place(self) -> Place:
        """Where a change of the same tensor is written."""
        return Place(self.module, self.shape, self.stored_in_out, self.is_embedding)

    def expand(self, base: Tensor) -> Tensor:
        """The change of the tensor as stored, given the base's."""
        import torch

        if self.magnitude is None:
            factors = self.factors()
            return (factors.left @ factors.right).reshape(self.shape)
        A, B = self._scaled()
        W = at_least_float32(base).flatten(1)
        W = W.T if self.stored_in_out else W
        changed = torch.addmm(W.to(B.dtype), B, A)
        lengths = at_least_float32(self.read(self.magnitude)).reshape(-1)
        rescaling = lengths / torch.linalg.vector_norm(changed, dim=1)
        # A module that was never trained changes nothing, exactly: its lengths are the base's own, up to rounding.
        rescaling = torch.where((rescaling - 1).abs() < _ROUNDING, 1.0, rescaling)
        changed *= rescaling[:, None]
        change = changed.sub_(W)
        return (change.T if self.stored_in_out else change).reshape(self.shape)


@dataclass(frozen=True)
class BiasChange:
    """What `lora_bias` adds to a module's bias: s times the bias of B."""

    read: Callable[[str], Tensor]
    bias: str
    scale: float
    is_low_rank = False

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the adapter's file."""
        return (self.bias,)

    def expand(self, base: Tensor) -> Tensor:  # noqa: ARG002
        """The change of the tensor."""
        return at_least_float32(self.read(self.bias)) * self.scale


def at_least_float32(tensor: Tensor) -> Tensor:
    """As it is, or in float32 if it is stored in less."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
