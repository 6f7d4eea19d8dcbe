"""Frames: the coordinates in which a method sees the task vectors of a matrix.

LoRA experts D_t = B_t A_t live in small spaces. With orthonormal bases `left` (m x p) of what they write, the columns of all
B_t, and `right` (n x q) of what they read, the rows of all A_t,

    D_t = left C_t right^T,   with cores C_t of p x q numbers, p and q at most the sum of the ranks (and one).

A method that commutes with orthonormal changes of coordinates merges the cores instead of the matrices: M(D) = left M(C) right^T,
exactly, at a cost of O((m + n) R^2) instead of O(T m n^2), without an m x n matrix. What such a method must not do is to count on
the coordinates themselves: the frame tells it the matrices' true shape, and where the vectors of ones went, which ACE centres by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Sides = Literal["both", "out", "in"]
"""Which sides of its matrices a method may see in other coordinates."""


@dataclass(frozen=True)
class Factors:
    """A low-rank task vector D = left right, never multiplied out."""

    left: Float[Tensor, "m r"]
    right: Float[Tensor, "r n"]


@dataclass(frozen=True)
class Frame:
    """A matrix of the given shape is left X right^T; None stands for the identity."""

    shape: tuple[int, int]
    left: Float[Tensor, "m p"] | None
    right: Float[Tensor, "n q"] | None
    device: torch.device

    @property
    def ones_out(self) -> Float[Tensor, " p"]:
        """left^T 1, the vector of m ones in these coordinates; `left` spans it."""
        return self._ones(0) if self.left is None else self.left.sum(0)

    @property
    def ones_in(self) -> Float[Tensor, " q"]:
        """right^T 1: the shadow of n ones. What is left out of it meets no expert."""
        return self._ones(1) if self.right is None else self.right.sum(0)

    def _ones(self, side: int) -> Tensor:
        return torch.ones(self.shape[side], dtype=torch.float64, device=self.device)

    def to_left(self, core: Float[Tensor, "p q"]) -> Float[Tensor, "m q"]:
        """left X."""
        return core if self.left is None else self.left.to(core.dtype) @ core

    def to_right(self, rows: Float[Tensor, "some q"]) -> Float[Tensor, "some n"]:
        """X right^T."""
        return rows if self.right is None else rows @ self.right.to(rows.dtype).T


def standard_frame(task_vectors: Float[Tensor, "task *shape"]) -> Frame:
    """The matrices as they are."""
    rows, columns = task_vectors.shape[1:] if task_vectors.dim() == 3 else (1, task_vectors[0].numel())
    return Frame((rows, columns), None, None, task_vectors.device)


def to_cores(experts: Sequence[Factors | None], shape: tuple[int, int], sides: Sides) -> tuple[Frame, Float[Tensor, "task p q"]]:
    """A frame common to all experts, and their cores in it, in float64; None is an expert that changed nothing."""
    present = [factors for factors in experts if factors is not None]
    ranks = [factors.left.shape[1] for factors in present]
    left = right = None
    written: Sequence[Tensor] = [factors.left.double() for factors in present]
    read: Sequence[Tensor] = [factors.right.double().T for factors in present]
    device = present[0].left.device
    if sides in ("both", "out"):
        ones = torch.ones(shape[0], 1, dtype=torch.float64, device=device)
        left, triangle = torch.linalg.qr(torch.cat([ones, *written], 1))
        written = triangle[:, 1:].split(ranks, 1)
    if sides in ("both", "in"):
        right, triangle = torch.linalg.qr(torch.cat(list(read), 1))
        read = triangle.split(ranks, 1)
    rows, columns = written[0].shape[0], read[0].shape[0]
    cores = torch.zeros(len(experts), rows, columns, dtype=torch.float64, device=device)
    changed = [t for t, factors in enumerate(experts) if factors is not None]
    for t, own_written, own_read in zip(changed, written, read, strict=True):
        torch.mm(own_written, own_read.T, out=cores[t])
    return Frame(shape, left, right, device), cores


def low_rank_factors(
    core: Float[Tensor, "p q"], frame: Frame, rank: int | None, energy: float | None = None
) -> tuple[Factors, float]:
    """left X right^T as a product of two factors of equal size, and |.|_F^2 of that product.

    At its own rank, which leaves out what float32 would not show; or the nearest matrix of at most the rank given, or of the
    smallest rank that keeps this share of its energy.
    """
    U, s, Vt = torch.linalg.svd(core, full_matrices=False)
    clear = int((s > torch.finfo(torch.float32).eps * s[:1]).sum())
    kept = min(rank or clear, clear, clear if energy is None else rank_for_energy(s, energy * float(s.square().sum())))
    U, s, V = U[:, :kept], s[:kept], Vt[:kept].T
    half = s.sqrt()
    return Factors(frame.to_left(U * half), frame.to_right((V * half).T)), float(s.square().sum())


def rank_for_energy(values: Float[Tensor, " k"], wanted: float) -> int:
    """How many of the leading singular values have this sum of squares; one more than there are if all have less.

    >>> rank_for_energy(torch.tensor([2.0, 1.0, 1.0]), 5.0)
    2
    """
    return int((values.square().cumsum(0) < wanted * (1 - 1e-12)).sum()) + 1


def rounding_energy(exact: Factors, dtype: torch.dtype) -> float:
    """|A B - A' B'|_F^2 for the factors as a dtype holds them, without multiplying out: A B - A' B' = dA B + A' dB."""
    A_, B_ = exact.left.to(dtype).double(), exact.right.to(dtype).double()
    A, B = exact.left.double(), exact.right.double()
    dA, dB = A - A_, B - B_
    terms = ((dA.T @ dA) * (B @ B.T)).sum() + ((A_.T @ A_) * (dB @ dB.T)).sum() + 2 * ((dA.T @ A_) * (B @ dB.T)).sum()
    return max(float(terms), 0.0)  # in this order a factor that the dtype cannot hold comes out as NaN, not as 0
