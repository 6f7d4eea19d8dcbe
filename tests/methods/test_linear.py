"""Linear merging against its formula, and its invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from elementwise_cases import assert_matches, every_case, flatten, random_tasks, run, small_model


@every_case
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("weights", [(0.7, 0.3, 1.0), (2.0, 0.0, -0.5), (1.0, 1.0, 1.0)])
def test_linear_against_its_formula(
    shape: tuple[int, ...], weights: tuple[float, ...], normalise: bool, dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    expected = sum(w * t.double().numpy() for w, t in zip(weights, tau, strict=True)) / (sum(weights) if normalise else 1)
    assert_matches(run("linear", tau, weights=weights, normalise=normalise).delta, expected, dtype)


def test_linear_is_the_weighted_average_of_the_weights() -> None:
    base, experts = small_model()
    merged = acemerge.merge_state_dicts(base, experts, method="linear", weights=[3, 1, 1])
    w = {"a": 0.6, "b": 0.2, "c": 0.2}
    np.testing.assert_allclose(flatten(merged), sum(w[n] * flatten(experts[n]) for n in w), atol=1e-6)


def test_linear_without_weights_is_the_average_or_the_sum() -> None:
    tau = random_tasks(4, 5, 4)
    assert run("linear", tau).delta.equal(run("average", tau).delta)
    assert run("linear", tau, normalise=False).delta.equal(run("task_arithmetic", tau).delta)
    torch.testing.assert_close(run("linear", tau).delta, tau.mean(0))
    torch.testing.assert_close(run("linear", tau, normalise=False).delta, tau.sum(0))


def test_linear_ignores_the_scale_of_its_weights() -> None:
    tau = random_tasks(3, 5, 4)
    torch.testing.assert_close(run("linear", tau, weights=(1, 2, 4)).delta, run("linear", tau, weights=(10, 20, 40)).delta)


def test_linear_with_one_weight_returns_that_expert() -> None:
    tau = random_tasks(3, 5, 4)
    assert run("linear", tau, weights=(0, 1, 0)).delta.equal(tau[1])
    assert run("linear", tau[:1], weights=5).delta.equal(tau[0])


@pytest.mark.parametrize("weights", [(1, -1), (0, 0, 0), (0.1, 0.2, -0.3)])
def test_linear_refuses_weights_that_sum_to_zero(weights: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="sum to 0 and cannot be normalised"):
        get_method("linear").options({"weights": weights})
    assert get_method("linear").options({"weights": weights, "normalise": False})
