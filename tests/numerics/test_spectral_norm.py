"""The largest singular value, against numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.numerics.spectral_norm import spectral_norm
from spectral_cases import gaussian


@given(m=st.integers(1, 40), n=st.integers(1, 40), seed=st.integers(0, 100), scale=st.floats(1e-6, 1e6))
def test_agrees(m: int, n: int, seed: int, scale: float) -> None:
    matrix = scale * gaussian(m, n, seed=seed)
    assert spectral_norm(matrix) == pytest.approx(float(np.linalg.norm(matrix.numpy(), 2)), rel=1e-12)


@pytest.mark.parametrize("shape", [(600, 300), (300, 700)])
@pytest.mark.parametrize("decay", [0.0, 0.01, 1.0])
def test_agrees_on_larger_matrices(shape: tuple[int, int], decay: float) -> None:
    """Whether the largest values lie close together or not."""
    weaker = torch.arange(1, shape[1] + 1, dtype=torch.float64) ** -decay
    matrix = (gaussian(*shape, seed=1) * weaker).float()
    assert spectral_norm(matrix) == pytest.approx(float(np.linalg.norm(matrix.double().numpy(), 2)), rel=1e-9)


def test_equal_values_one_value_and_none() -> None:
    assert spectral_norm(5 * torch.eye(300)) == pytest.approx(5, rel=1e-12)
    assert spectral_norm(torch.ones(4, 900)) == pytest.approx(60, rel=1e-12)
    assert spectral_norm(torch.zeros(30, 20)) == 0


def test_is_the_same_every_time() -> None:
    matrix = gaussian(90, 70, seed=3)
    assert spectral_norm(matrix) == spectral_norm(matrix.clone())
