"""RAM and RAM+ against their formulas, entry by entry, and their invariants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import acemerge
from elementwise_cases import (
    Array,
    assert_matches,
    assert_whole_model,
    differences,
    every_case,
    flatten,
    random_tasks,
    run,
    small_model,
)


def ram_reference(taus: Array, epsilon: float, lambdas: Sequence[float]) -> Array:
    merged = np.zeros(taus.shape[1:])
    for index in np.ndindex(merged.shape):
        changed = [t for t in range(len(taus)) if abs(taus[(t, *index)]) > epsilon]
        if len(changed) == 1:
            merged[index] = lambdas[changed[0]] * taus[(changed[0], *index)]
        elif changed:
            merged[index] = sum(taus[(t, *index)] for t in changed) / len(changed)
    return merged


def lambdas_reference(taus: Array, epsilon: float, strength: float, limit: float) -> list[float]:
    changed = abs(taus.reshape(len(taus), -1)) > epsilon
    lambdas = []
    for own in changed:
        shared, unique = int((own & (changed.sum(0) > 1)).sum()), int((own & (changed.sum(0) == 1)).sum())
        lambdas.append(1 + strength * min(shared / unique, limit) if unique else 1.0)
    return lambdas


def sparse_tasks(tasks: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Most entries of an expert are its own, or nobody's."""
    drawn = random_tasks(tasks, *shape, seed=1)
    return (random_tasks(tasks, *shape) * (drawn > 0.01)).to(dtype)


@every_case
@pytest.mark.parametrize("tasks", [1, 2, 4])
@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 0.02])
def test_ram_against_its_formula(shape: tuple[int, ...], tasks: int, epsilon: float, dtype: torch.dtype) -> None:
    tau = sparse_tasks(tasks, *shape, dtype=dtype)
    expected = ram_reference(tau.double().numpy(), epsilon, [1.0] * tasks)
    assert_matches(run("ram", tau, epsilon=epsilon).delta, expected, dtype)


@every_case
@pytest.mark.parametrize(("strength", "limit"), [(0.1, 0.2), (0.7, 10.0)])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ram_plus_against_its_formula(
    shape: tuple[int, ...], strength: float, limit: float, scope: str, dtype: torch.dtype
) -> None:
    tau = sparse_tasks(3, *shape, dtype=dtype)
    exact = tau.double().numpy()
    expected = ram_reference(exact, 1e-5, lambdas_reference(exact, 1e-5, strength, limit))
    assert_matches(run("ram_plus", tau, strength=strength, limit=limit, scope=scope).delta, expected, dtype)


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ram_plus_of_a_whole_model(scope: str) -> None:
    """Thresholds so high that many entries are unchanged or one expert's own."""
    base, experts = small_model(3)
    epsilon, strength, limit = 0.06, 0.7, 10.0
    options: dict[str, Any] = {"epsilon": epsilon, "strength": strength, "limit": limit, "scope": scope}
    merged = acemerge.merge_state_dicts(base, experts, method="ram_plus", **options)
    taus = differences(base, experts)
    whole = np.stack([flatten(tau) for tau in taus.values()])
    if scope == "model":
        delta = ram_reference(whole, epsilon, lambdas_reference(whole, epsilon, strength, limit))
    else:
        parts = []
        for name in sorted(base):
            if base[name].is_floating_point():
                own = np.stack([tau[name].double().numpy().reshape(-1) for tau in taus.values()])
                parts.append(ram_reference(own, epsilon, lambdas_reference(own, epsilon, strength, limit)))
        delta = np.concatenate(parts)
    assert_whole_model(merged, base, delta, 1.0)


def test_dense_changes_are_averaged() -> None:
    tau = random_tasks(3, 6, 5)
    torch.testing.assert_close(run("ram", tau, epsilon=0).delta, run("average", tau).delta)


def test_changes_that_do_not_meet_are_kept_whole() -> None:
    tau = torch.tensor([[[0.5, 0.0, 0.0]], [[0.0, -0.25, 0.0]]], dtype=torch.float64)
    assert run("ram", tau).delta.tolist() == [[0.5, -0.25, 0.0]]
    assert run("ram_plus", tau).delta.tolist() == [[0.5, -0.25, 0.0]]


def test_ram_plus_without_strength_is_ram() -> None:
    tau = sparse_tasks(3, 6, 5)
    assert run("ram_plus", tau, strength=0).delta.equal(run("ram", tau).delta)
    assert run("ram_plus", tau, limit=0).delta.equal(run("ram", tau).delta)


def test_what_changed_by_epsilon_or_less_is_unchanged() -> None:
    tau = torch.tensor([[[0.5, 0.25, -0.75]]], dtype=torch.float64)
    assert run("ram", tau, epsilon=0.5).delta.tolist() == [[0, 0, -0.75]]
