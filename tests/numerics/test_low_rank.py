"""The nearest matrix of low rank, against numpy's full decomposition."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from acemerge.numerics.frame import Factors
from acemerge.numerics.low_rank import nearest_factors, residual_energy


def noise(rows: int, columns: int) -> Tensor:
    """A spectrum as flat as can be."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 1e-3


def decaying(rows: int, columns: int) -> Tensor:
    U, _, Vt = np.linalg.svd(noise(rows, columns).double().numpy(), full_matrices=False)
    values = np.arange(1, min(rows, columns) + 1) ** -0.7
    return torch.from_numpy((U * values) @ Vt).float()


def error(matrix: Tensor, factors: Factors) -> float:
    return float((matrix.double() - factors.left @ factors.right).norm())


Maker = Callable[[int, int], Tensor]
MAKERS: list[Maker] = [noise, decaying]


@cache
def decomposed(make: Maker, rows: int, columns: int) -> tuple[Tensor, "np.ndarray[tuple[int], np.dtype[np.float64]]"]:
    """A matrix and its singular values, for all tests that only read them."""
    matrix = make(rows, columns)
    return matrix, np.linalg.svd(matrix.double().numpy(), compute_uv=False)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("rows", "columns"), [(30, 50), (300, 200), (640, 900), (900, 640)])
@pytest.mark.parametrize("rank", [1, 8, 64, 1000])
def test_the_error_is_the_smallest_possible(make: Maker, rows: int, columns: int, rank: int) -> None:
    """Eckart and Young: exactly for small matrices and high ranks, within 1% where random projections are used."""
    matrix, s = decomposed(make, rows, columns)
    factors = nearest_factors(matrix, rank, None)
    smallest = float(np.sqrt((s[rank:] ** 2).sum()))
    sketched = min(rows, columns) > 512 and rank <= 64
    assert factors.left.shape[1] == min(rank, rows, columns)
    assert error(matrix, factors) <= smallest * (1.01 if sketched else 1 + 1e-6) + 1e-10 * s[0]
    assert float(factors.left.norm()) == pytest.approx(float(factors.right.norm()))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("energy", [0.1, 0.5, 0.95, 1.0])
def test_the_smallest_rank_that_keeps_an_energy(make: Maker, energy: float) -> None:
    matrix, s = decomposed(make, 600, 700)
    squares = s**2
    best = int((squares.cumsum() < energy * squares.sum() * (1 - 1e-9)).sum()) + 1
    factors = nearest_factors(matrix, None, energy)
    assert error(matrix, factors) ** 2 <= (1 - energy + 1e-9) * squares.sum()
    assert best <= factors.left.shape[1] <= 1.05 * best + 1
    assert nearest_factors(matrix, 3, energy).left.shape[1] == min(3, best)


@pytest.mark.parametrize("rows", [40, 700])
def test_a_matrix_of_low_rank_is_found_exactly(rows: int) -> None:
    matrix = noise(rows, 5) @ noise(5, 800) * 1e3
    for factors in (nearest_factors(matrix, 16, None), nearest_factors(matrix, None, 1.0)):
        assert factors.left.shape[1] <= 6  # float32 gives such a product a little more than its rank
        assert error(matrix, factors) <= 1e-5 * float(matrix.norm())


def test_the_same_factors_every_time() -> None:
    first, again = (nearest_factors(noise(600, 800), 16, None) for _ in range(2))
    assert torch.equal(first.left, again.left)
    assert torch.equal(first.right, again.right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_residual_is_measured_with_the_factors_as_they_are(dtype: torch.dtype) -> None:
    matrix = noise(1500, 800)
    factors = nearest_factors(matrix, 4, None)
    left, right = factors.left.to(dtype), factors.right.to(dtype)
    expected = (matrix.double() - left.double() @ right.double()).square().sum()
    assert residual_energy(matrix, left, right) == pytest.approx(float(expected), rel=1e-12)
