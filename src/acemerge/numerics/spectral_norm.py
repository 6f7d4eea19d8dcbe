"""How strong a matrix is in its strongest direction."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.linalg import IN_CACHE, row_blocks
from acemerge.numerics.randomness import generator_for

_STEPS = 200
_SETTLED = 1e-13


def spectral_norm(matrix: Float[Tensor, "m n"]) -> float:
    """|A|_2, the largest singular value, by Lanczos' method on A^T A: a pass over the matrix for each step, no Gram matrix.

    Its estimates rise to the largest eigenvalue, with the square of the error of their vectors; small matrices end exactly.

    >>> spectral_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0], [0.0, 0.0]]))
    4.0
    """
    from scipy.linalg import eigvalsh_tridiagonal  # takes a tenth of a second: not for methods that do without

    if matrix.shape[0] < matrix.shape[1]:
        return spectral_norm(matrix.T)
    vectors = _first_vector(matrix)
    diagonal: list[float] = []
    beside: list[float] = []
    found = 0.0
    while True:
        image = _squared_times(matrix, vectors[-1])
        diagonal.append(float(image @ vectors[-1]))
        for _ in range(2):  # once is not enough: what rounding leaves of earlier vectors grows
            image -= (vectors @ image) @ vectors
        known, found = found, float(eigvalsh_tridiagonal(diagonal, beside)[-1])
        length = float(image.norm())
        if len(vectors) == min(matrix.shape[1], _STEPS) or min(length, found - known) <= _SETTLED * found:
            return math.sqrt(max(0.0, found))
        vectors = torch.cat((vectors, image[None] / length))
        beside.append(length)


def _first_vector(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "one n"]:
    """Of no direction in particular, and always the same."""
    drawn = torch.randn(1, matrix.shape[1], dtype=torch.float64, generator=generator_for(0, "spectral norm"))
    first: Tensor = drawn / drawn.norm()
    return first.to(matrix.device)


def _squared_times(matrix: Float[Tensor, "m n"], x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """A^T A x in float64, a block of rows at a time."""
    total = torch.zeros_like(x)
    for rows in row_blocks(len(matrix), matrix.shape[1], IN_CACHE):
        block = matrix[rows].double()
        total.addmv_(block.T, block @ x)
    return total
