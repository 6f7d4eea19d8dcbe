"""ACE on matrices that are large enough for float32 to pay: as good as float64, or done in float64."""

from functools import cache

import pytest
import torch
from torch import Tensor

from acemerge.methods import Merged, get_method
from acemerge.methods.ace import SMALL

ACE = get_method("ace")
SHAPES = {"square": (SMALL, SMALL), "tall": (SMALL + 300, SMALL), "wide": (SMALL, SMALL + 300)}
BRANCHES = {"homogeneous": 1e9, "heterogeneous": 0.0}


@cache
def experts(shape: tuple[int, int], decay: float, tasks: int = 3) -> Tensor:
    """Task vectors whose i-th singular value is i^-decay, in float32."""
    rank = min(shape)
    values = torch.arange(1, rank + 1, dtype=torch.float64) ** -decay
    left, right = ([basis(size, rank, 2 * t + side) for t in range(tasks)] for side, size in enumerate(shape))
    matrices = [(left[t] * values) @ right[t].T * (1 + t) for t in range(tasks)]
    return torch.stack([0.1 * matrix / values.norm() for matrix in matrices]).float()


@cache
def basis(size: int, rank: int, seed: int) -> Tensor:
    """Orthonormal columns."""
    generator = torch.Generator().manual_seed(seed)
    orthonormal, _ = torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64))
    assert isinstance(orthonormal, Tensor)
    return orthonormal


def merge(task_vectors: Tensor, branch: str, epsilon: float = 1e-5) -> Merged:
    merged = ACE(task_vectors, ACE.options({"epsilon": epsilon, "tau": BRANCHES[branch]}))
    assert merged.facts["branch"] == branch
    return merged


@pytest.mark.parametrize(
    ("shape", "branch", "decay"),
    [
        *(("square", "homogeneous", decay) for decay in (0.0, 1.0)),
        *(("square", "heterogeneous", decay) for decay in (0.5, 2.0)),
        *(("tall", "homogeneous", decay) for decay in (0.5, 2.0)),
        *(("tall", "heterogeneous", decay) for decay in (0.0, 1.0)),
        *(("wide", "homogeneous", decay) for decay in (0.5, 1.0)),
        *(("wide", "heterogeneous", decay) for decay in (0.0, 2.0)),
    ],
)
def test_agrees_with_float64(shape: str, branch: str, decay: float) -> None:
    given = experts(SHAPES[shape], decay)
    merged, exact = merge(given, branch), merge(given.double(), branch)
    assert exact.facts["precision"] == "float64"
    assert torch.linalg.norm(merged.delta - exact.delta) <= 1e-4 * torch.linalg.norm(exact.delta)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_precision_follows_the_condition(shape: str, branch: str) -> None:
    assert merge(experts(SHAPES[shape], 0.25), branch).facts["precision"] == "float32"
    assert merge(experts(SHAPES[shape], 2.0), branch).facts["precision"] == "float64"


def test_small_epsilon_needs_float64() -> None:
    given = experts(SHAPES["wide"], 0.5)
    assert merge(given, "homogeneous", 1e-3).facts["precision"] == "float32"
    assert merge(given, "homogeneous", 1e-9).facts["precision"] == "float64"


def test_small_matrices_are_float64() -> None:
    assert merge(experts((SMALL - 1, SMALL), 0.0), "homogeneous").facts["precision"] == "float64"


def test_very_wide_matrices_are_float64() -> None:
    """Their dual system subtracts what is almost equal."""
    assert merge(experts((SMALL, 2 * SMALL + 1), 0.0, tasks=2), "homogeneous").facts["precision"] == "float64"
