"""How much the experts disturb each other, against the layer objective."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import acemerge
from acemerge.diagnosis.interference import Objective
from acemerge.methods import get_method
from random_tasks import low_rank, random_tasks


def reference_objective(M: Tensor, D: Tensor) -> float:
    """Tr[(M - D) Shat (M - D)^T], from the definition."""
    C = D - D.mean(0, keepdim=True)
    error = M - D
    return float(torch.trace(error @ (C.T @ C) @ error.T))


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
def test_interference_is_the_layer_objective_over_the_base_s(shape: tuple[int, int]) -> None:
    tasks, M = random_tasks(3, *shape), random_tasks(*shape, seed=2)
    own, together = Objective(tasks, None).of(M)
    zero = torch.zeros_like(M)
    terms, base = [reference_objective(M, D) for D in tasks], [reference_objective(zero, D) for D in tasks]
    np.testing.assert_allclose([value or 0 for value in own], [a / b for a, b in zip(terms, base, strict=True)])
    assert together == pytest.approx(sum(terms) / sum(base))
    assert Objective(tasks, None).of(zero) == ([1.0] * 3, 1.0)
    assert Objective(tasks, None).of(tasks[1])[0][1] == 0.0


def test_interference_in_the_core_is_that_of_the_products() -> None:
    dense, frame, cores = low_rank(3, 20, 30, 2)
    ace = get_method("ace")
    options = ace.options({"epsilon": 1e-3})
    M = ace(dense, options).delta
    core = ace(cores, options, acemerge.methods.Context(experts=("a", "b", "c"), frame=frame)).delta
    expected, found = Objective(dense, None).of(M), Objective(cores, frame).of(core)
    np.testing.assert_allclose([*found[0], found[1]], [*expected[0], expected[1]], rtol=1e-7)  # type: ignore[arg-type]


def test_an_expert_without_a_covariance_has_no_forecast() -> None:
    own, together = Objective(torch.zeros(1, 3, 4), None).of(torch.ones(3, 4))
    assert (own, together) == ([None], None)
