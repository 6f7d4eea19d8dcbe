"""The Karcher mean against its iteration on whole vectors and against what defines it, and its invariants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model


def karcher_reference(weights_of_experts: Array, shares: Sequence[float], iterations: int = 10, tolerance: float = 1e-5) -> Array:
    """The iteration with the vectors themselves: log map to the tangent space, mean there, exponential map back."""
    W = [np.asarray(w).reshape(-1) for w in weights_of_experts]
    lengths = [float(np.linalg.norm(w)) for w in W]
    a = np.array(shares) / sum(shares)
    units = [w / length for w, length in zip(W, lengths, strict=True)]
    mean = np.asarray(sum(own * unit for own, unit in zip(a, units, strict=True)))
    mean = mean / np.linalg.norm(mean) if np.linalg.norm(mean) >= tolerance else units[0]
    for _ in range(iterations):
        tangent = np.zeros_like(mean)
        for own, unit in zip(a, units, strict=True):
            across = unit - float(unit @ mean) * mean
            theta = math.atan2(float(np.linalg.norm(across)), float(unit @ mean))
            if tolerance <= theta <= math.pi - tolerance:
                tangent += own * theta * across / np.linalg.norm(across)
        step = float(np.linalg.norm(tangent))
        if step < tolerance:
            break
        mean = math.cos(step) * mean + math.sin(step) * tangent / step
        mean /= np.linalg.norm(mean)
    return (float(a @ lengths) * mean).reshape(weights_of_experts.shape[1:])


@every_case
@pytest.mark.parametrize("shares", [(1, 1, 1), (0.2, 3, 0)])
@pytest.mark.parametrize("strength", [1.0, 0.02])
def test_karcher_against_its_iteration(
    shape: tuple[int, ...], shares: tuple[float, ...], strength: float, dtype: torch.dtype
) -> None:
    tau, base = strength * random_tasks(3, *shape, dtype=dtype), random_tasks(1, *shape, seed=9, dtype=dtype)[0]
    w0 = base.double().numpy()
    expected = karcher_reference(w0 + tau.double().numpy(), shares) - w0
    assert_matches(run("karcher", tau, base=base, weights=shares).delta, expected, dtype)


def test_karcher_of_a_whole_model() -> None:
    base, experts = small_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="karcher", weights=[1, 2, 3])
    for name, value in merged.items():
        if value.is_floating_point():
            expected = karcher_reference(np.stack([e[name].double().numpy() for e in experts.values()]), (1, 2, 3))
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_at_the_mean_the_pulls_of_all_experts_balance() -> None:
    W = random_tasks(4, 40)
    m = run("karcher", W, weights=(1, 2, 3, 4), iterations=100, tolerance=1e-10).delta
    m = m / m.norm()
    units = torch.nn.functional.normalize(W, dim=1)
    cosines = units @ m
    across = units - cosines[:, None] * m
    logs = torch.nn.functional.normalize(across, dim=1) * cosines.acos()[:, None]
    assert float((torch.tensor([1.0, 2, 3, 4], dtype=torch.float64) / 10 @ logs).norm()) < 1e-9


@pytest.mark.parametrize("t", [0.2, 0.5, 0.9])
def test_two_experts_of_equal_length_are_joined_as_slerp_does(t: float) -> None:
    W = torch.nn.functional.normalize(random_tasks(2, 30), dim=1)
    found = run("karcher", W, weights=(1 - t, t), iterations=100, tolerance=1e-10).delta
    torch.testing.assert_close(found, run("slerp", W, t=t).delta, rtol=1e-9, atol=1e-11)


def test_without_iterations_it_is_the_mean_direction() -> None:
    W = random_tasks(3, 6, 5)
    assert run("karcher", W, iterations=0).facts["steps"] == 0
    torch.testing.assert_close(run("karcher", W, iterations=0).delta, run("multislerp", W).delta, rtol=1e-12, atol=1e-14)


def test_it_does_not_depend_on_what_base_the_weights_are_measured_from() -> None:
    W, origins = random_tasks(3, 6, 5), random_tasks(2, 6, 5, seed=3)
    results = [origin + run("karcher", W - origin, base=origin).delta for origin in origins]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_equal_experts_come_back_and_what_is_found_is_told() -> None:
    W = random_tasks(1, 6, 5).expand(3, 6, 5)
    merged = run("karcher", W)
    torch.testing.assert_close(merged.delta, W[0], rtol=1e-12, atol=1e-15)
    assert merged.facts == {"cosine": pytest.approx(1), "steps": 0}


def test_opposite_and_vanishing_experts_stay_finite() -> None:
    W = random_tasks(1, 6, 5)
    assert torch.isfinite(run("karcher", torch.cat([W, -W])).delta).all()
    with_zero = run("karcher", torch.cat([W, 0 * W])).delta
    torch.testing.assert_close(with_zero, W[0] / 2, rtol=1e-12, atol=1e-15)


def test_weights_must_be_worth_something() -> None:
    with pytest.raises(InputError, match="sum to 0"):
        get_method("karcher").options({"weights": [0, 0]})
    with pytest.raises(InputError, match="it must be"):
        get_method("karcher").options({"weights": [1, -1]})
