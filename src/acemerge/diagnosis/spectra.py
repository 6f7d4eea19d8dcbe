"""Singular spectra: how concentrated a merge is, what refinement changes, and which input directions experts share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.linalg import LeadingDirections, leading_directions

LEADING_SHARE = 0.05
"""The paper's figure: how much of the energy the top 5% of the singular values hold."""
_POINTS = 60
"""A spectrum is kept as so many of its values at most: enough to draw it."""


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one matrix."""

    share: list[float]
    values: list[float]
    """Positions between 0 and 1, and the singular values there, largest first."""
    leading_energy: float
    """The share of the energy in the top 5% of the singular values."""
    stable_rank: float
    """Energy over the largest squared singular value: how many directions carry the matrix."""


@dataclass(frozen=True)
class Spectra:
    """Of one merged tensor: P before and M after refinement (the same where nothing is refined), and the experts'."""

    plain: Spectrum
    merged: Spectrum
    leading_cosine: float
    """Of the first singular vectors of P and M, the smaller of left and right."""
    kept_subspace: float
    """How much of P's top 5% of input directions lies within M's (1: all)."""
    leading_energies: list[float]
    """Of each expert's own change: near 1 if it has a low rank, as LoRA's."""
    overlap: list[list[float]]
    """Between experts' leading input directions: 1 the same subspace, `chance` for unrelated ones."""
    chance: float


def measure_spectra(task_vectors: Float[Tensor, "task out in"], P: Tensor, M: Tensor, shape: tuple[int, int]) -> Spectra:
    """`shape` is the matrices' own, where the task vectors are given by their low-rank cores."""
    plain = leading_directions(P.double(), min(P.shape))
    merged = plain if M is P else leading_directions(M.double(), min(M.shape))
    k = leading_count(shape)
    experts = [leading_directions(D.double(), k) for D in task_vectors]
    return Spectra(
        plain=_spectrum(plain, shape),
        merged=_spectrum(merged, shape),
        leading_cosine=_leading_cosine(plain, merged),
        kept_subspace=_overlap(_top(plain.right, k), _top(merged.right, k)),
        leading_energies=[
            float(found.values.square().sum() / D.double().square().sum()) if len(found.values) else 0.0
            for D, found in zip(task_vectors, experts, strict=True)
        ],
        overlap=[[_overlap(a.right, b.right) for b in experts] for a in experts],
        chance=k / shape[1],
    )


def leading_count(shape: tuple[int, int]) -> int:
    """How many directions the top 5% are."""
    return max(1, int(LEADING_SHARE * min(shape)))


def _spectrum(found: LeadingDirections, shape: tuple[int, int]) -> Spectrum:
    values = found.values.flip(0)
    energy = values.square()
    total = float(energy.sum())
    if total == 0:
        return Spectrum([], [], 0.0, 0.0)
    kept = sorted({round(i * (len(values) - 1) / (_POINTS - 1)) for i in range(_POINTS)})
    return Spectrum(
        share=[(i + 1) / min(shape) for i in kept],
        values=values[kept].tolist(),
        leading_energy=float(energy[: leading_count(shape)].sum()) / total,
        stable_rank=total / float(energy[0]),
    )


def _leading_cosine(a: LeadingDirections, b: LeadingDirections) -> float:
    if not len(a.values) or not len(b.values):
        return 0.0
    return min(abs(float(a.left[:, -1] @ b.left[:, -1])), abs(float(a.right[:, -1] @ b.right[:, -1])))


def _top(directions: Float[Tensor, "n found"], k: int) -> Tensor:
    """The last k: directions come smallest first."""
    return directions[:, max(0, directions.shape[1] - k) :]


def _overlap(a: Float[Tensor, "n p"], b: Float[Tensor, "n q"]) -> float:
    """|A^T B|_F^2 / min(p, q): the mean squared cosine of the principal angles."""
    directions = min(a.shape[1], b.shape[1])
    return float((a.T @ b).square().sum()) / directions if directions else 0.0
