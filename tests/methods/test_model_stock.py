"""Model Stock against its formula, vector by vector, and its invariants."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

import acemerge
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model


def model_stock_reference(taus: Array) -> Array:
    """Of one vector of each expert: t = T cos / (1 + (T - 1) cos) times the mean."""
    cosines = []
    for a, b in combinations(taus, 2):
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        cosines.append(float(a @ b) / lengths if lengths else 0.0)
    experts, cosine = len(taus), sum(cosines) / len(cosines)
    denominator = 1 + (experts - 1) * cosine
    t = experts * cosine / denominator if abs(denominator) >= 1e-6 else 0.0
    return np.asarray(t * taus.mean(0))


def of_tensor(taus: Array, scope: str) -> Array:
    shape = taus.shape[1:]
    n = shape[-1] if scope == "row" and shape else taus[0].size
    rows = taus.reshape(len(taus), -1, n)
    return np.stack([model_stock_reference(rows[:, i]) for i in range(rows.shape[1])]).reshape(shape)


def alike(tasks: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Experts that have half of their change in common."""
    return random_tasks(tasks, *shape, dtype=dtype) + 0.05 * random_tasks(1, *shape, seed=5, dtype=dtype)


@every_case
@pytest.mark.parametrize("tasks", [2, 4])
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_model_stock_against_its_formula(shape: tuple[int, ...], tasks: int, scope: str, dtype: torch.dtype) -> None:
    tau = alike(tasks, *shape, dtype=dtype)
    assert_matches(run("model_stock", tau, scope=scope).delta, of_tensor(tau.double().numpy(), scope), dtype)


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_model_stock_of_a_whole_model(scope: str) -> None:
    base, experts = small_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="model_stock", scope=scope)
    for name, value in merged.items():
        if value.is_floating_point():
            taus = np.stack([(e[name] - base[name]).double().numpy() for e in experts.values()])
            expected = base[name].double().numpy() + of_tensor(taus, scope)
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_equal_experts_are_taken_whole() -> None:
    tau = random_tasks(1, 6, 5).expand(3, 6, 5)
    merged = run("model_stock", tau)
    torch.testing.assert_close(merged.delta, tau[0], rtol=1e-12, atol=1e-15)
    assert merged.facts["ratio"] == pytest.approx(1)
    assert merged.facts["cosine"] == pytest.approx(1)


def test_orthogonal_experts_give_the_base() -> None:
    tau = torch.eye(3, dtype=torch.float64).reshape(3, 3, 1)
    merged = run("model_stock", tau)
    assert not merged.delta.any()
    assert merged.facts == {"cosine": 0.0, "ratio": 0.0}


def test_experts_that_cancel_give_the_base() -> None:
    tau = random_tasks(1, 6, 5)
    assert not run("model_stock", torch.cat([tau, -tau])).delta.any()


def test_an_experts_length_does_not_change_the_ratio() -> None:
    tau = alike(3, 6, 5)
    longer = tau * torch.tensor([1e-6, 3.0, 1e5], dtype=torch.float64).view(3, 1, 1)
    assert run("model_stock", longer).facts["ratio"] == pytest.approx(run("model_stock", tau).facts["ratio"], rel=1e-9)


def test_one_expert_is_taken_as_it_is_with_a_warning() -> None:
    tau = random_tasks(1, 6, 5)
    merged = run("model_stock", tau)
    assert merged.delta.equal(tau[0])
    assert merged.warnings == ("there is one expert, and no angle between two: it is taken as it is",)


def test_tensors_without_entries() -> None:
    for scope in ("tensor", "row"):
        assert run("model_stock", torch.zeros(2, 0, 3), scope=scope).delta.shape == (0, 3)
        assert run("model_stock", torch.zeros(2, 3, 0), scope=scope).delta.shape == (3, 0)
