"""SCE against its formula, entry by entry, and its invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import acemerge
from elementwise_cases import NAMES, Array, assert_matches, every_case, random_tasks, run, small_model
from elementwise_references import exact_floor


def sce_reference(taus: Array, select: float) -> Array:
    shape = taus.shape[1:]
    delta = taus.reshape(len(taus), -1).copy()
    if select < 1:
        variance = [float(np.mean((column - column.mean()) ** 2)) for column in delta.T]
        varying = sorted((j for j, v in enumerate(variance) if v > 0), key=lambda j: (-variance[j], j))
        delta[:, sorted(set(range(delta.shape[1])) - set(varying[: exact_floor(len(varying), select)]))] = 0
    energy = [math.fsum(row**2) for row in delta]
    eta = [e / math.fsum(energy) if any(energy) else 0.0 for e in energy]
    merged = np.zeros(delta.shape[1])
    for j in range(delta.shape[1]):
        sign = 1.0 if math.fsum(delta[:, j]) >= 0 else -1.0
        agreeing = [t for t in range(len(delta)) if np.sign(delta[t, j]) == sign]
        if agreeing:
            merged[j] = sum(eta[t] * delta[t, j] for t in agreeing) / sum(eta[t] for t in agreeing)
    return merged.reshape(shape)


@every_case
@pytest.mark.parametrize("select", [1.0, 0.29, 0.1])
@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_sce_against_its_formula(shape: tuple[int, ...], select: float, tasks: int, dtype: torch.dtype) -> None:
    tau = random_tasks(tasks, *shape, dtype=dtype)
    assert_matches(run("sce", tau, select=select).delta, sce_reference(tau.double().numpy(), select), dtype)


@pytest.mark.parametrize("select", [1.0, 0.3])
def test_sce_of_a_whole_model(select: float) -> None:
    base, experts = small_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="sce", select=select)
    for name, value in merged.items():
        if value.is_floating_point():
            taus = np.stack([(e[name] - base[name]).double().numpy() for e in experts.values()])
            expected = base[name].double().numpy() + sce_reference(taus, select)
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_weights_are_told_and_do_not_depend_on_the_unit() -> None:
    tau = torch.tensor([[[1e-9, 0.0]], [[0.0, 3e-9]]], dtype=torch.float64)
    facts = run("sce", tau).facts
    assert [facts[f"weight_{name}"] for name in NAMES[:2]] == pytest.approx([0.1, 0.9])


def test_equal_experts_come_back_unless_only_what_varies_is_selected() -> None:
    tau = random_tasks(1, 6, 5).expand(3, 6, 5)
    torch.testing.assert_close(run("sce", tau).delta, tau[0], rtol=1e-12, atol=1e-15)
    assert not run("sce", tau.float().double(), select=0.9).delta.any()


def test_at_most_the_share_that_is_selected_changes() -> None:
    tau = random_tasks(3, 10, 10)
    changed = int(run("sce", tau, select=0.29).delta.count_nonzero())
    assert 0 < changed <= 29


def test_an_entry_whose_sum_is_zero_is_positive() -> None:
    tau = torch.tensor([[[0.5, -0.5]], [[-0.5, 0.5]]], dtype=torch.float64)
    assert run("sce", tau).delta.tolist() == [[0.5, 0.5]]


def test_tensors_without_entries() -> None:
    assert run("sce", torch.zeros(2, 0, 3), select=0.5).delta.shape == (0, 3)
