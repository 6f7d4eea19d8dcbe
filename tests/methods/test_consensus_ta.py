"""Consensus TA against a plain float64 transcription, and what it must keep to."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from coefficient_cases import (
    PRECISIONS,
    SHAPES,
    Array,
    assert_merges_to,
    assert_relative,
    flattened,
    random_task_vectors,
    run,
    whole_model,
)


def reference_masks(taus: Array, tau_M: Array, lam: float) -> Array:
    masks = np.zeros_like(taus, dtype=bool)
    for t in range(len(taus)):
        for index in np.ndindex(tau_M.shape):
            tau = taus[(t, *index)]
            masks[(t, *index)] = abs(tau) > lam * abs(tau_M[index] - tau)
    return masks


def reference_ties_sum(flat: Array, keep: float) -> Array:
    """TIES with the sum of what agrees, on whole flattened task vectors."""
    trimmed = flat.copy()
    for u in trimmed:
        cut = np.sort(np.abs(u))[len(u) - math.floor(len(u) * keep) - 1] if keep < 1 else 0.0
        u[np.abs(u) < cut] = 0
    signs = np.sign(trimmed.sum(0))
    signs[signs == 0] = 1 if signs.sum() > 0 else -1
    return np.asarray(np.where(np.sign(trimmed) == signs, trimmed, 0).sum(0))


def reference_consensus(taus: Array, lam: float = 0.4, k: int = 2, tau_M: Array | None = None) -> Array:
    tau_M = taus.sum(0) if tau_M is None else tau_M
    return np.asarray(tau_M * (reference_masks(taus, tau_M, lam).sum(0) >= k))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tasks", "lam", "k"), [(2, 0.4, 2), (5, 0.2, 3), (8, 0.6, 1)])
def test_consensus_formula(dtype: torch.dtype, shape: tuple[int, ...], tasks: int, lam: float, k: int) -> None:
    task_vectors = random_task_vectors(*shape, tasks=tasks, dtype=dtype)
    found = run("consensus_ta", task_vectors, mask_lambda=lam, k=k, alpha=1.0)
    assert_relative(found.delta, reference_consensus(task_vectors.double().numpy(), lam, k), PRECISIONS[dtype])


def test_consensus_defaults() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4)
    assert_relative(run("consensus_ta", task_vectors).delta, 0.3 * reference_consensus(task_vectors.numpy()), 1e-12)


@pytest.mark.parametrize("keep", [0.2, 0.5, 1.0])
def test_consensus_ties_formula(keep: float) -> None:
    base, experts = whole_model(4)
    taus = flattened(base, experts)
    merged = acemerge.merge_state_dicts(base, experts, method="consensus_ta", merge="ties", keep=keep, alpha=1.0)
    assert_merges_to(base, merged, reference_consensus(taus, tau_M=reference_ties_sum(taus, keep)))


def test_consensus_of_a_whole_model() -> None:
    base, experts = whole_model(4)
    merged = acemerge.merge_state_dicts(base, experts, method="consensus_ta", alpha=1.0)
    assert_merges_to(base, merged, reference_consensus(flattened(base, experts)))


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 5), st.floats(0, 2))
def test_consensus_is_a_restriction_of_the_sum(seed: int, tasks: int, k: int, lam: float) -> None:
    task_vectors = random_task_vectors(6, 5, tasks=tasks, seed=seed)
    total = task_vectors.sum(0)
    found = run("consensus_ta", task_vectors, k=k, mask_lambda=lam, alpha=1.0).delta
    torch.testing.assert_close(found, torch.where(found == 0, 0.0, total))


def test_consensus_raising_k_never_adds_entries() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=5)
    supports = [run("consensus_ta", task_vectors, k=k).delta != 0 for k in range(6)]
    assert all(bool((more | ~fewer).all()) for more, fewer in itertools.pairwise(supports))
    assert supports[1].sum() > supports[3].sum()


def test_consensus_k_0_is_task_arithmetic() -> None:
    task_vectors = random_task_vectors(12, 8)
    task_arithmetic = acemerge.merge_task_vectors(task_vectors, method="task_arithmetic")
    torch.testing.assert_close(run("consensus_ta", task_vectors, k=0).delta, task_arithmetic)


@pytest.mark.parametrize("lam", [0.2, 1.0, 50.0])
def test_consensus_masks_of_disjoint_supports_are_the_supports(lam: float) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=2, dtype=torch.float32)
    task_vectors[0, :6] = 0
    task_vectors[1, 6:] = 0
    assert run("consensus_ta", task_vectors, k=1, mask_lambda=lam, alpha=1.0).delta.equal(task_vectors.sum(0).double())
    assert not run("consensus_ta", task_vectors, k=2, mask_lambda=lam).delta.any()


@pytest.mark.parametrize(("lam", "kept"), [(0.4, True), (0.5, False), (0.6, False)])
def test_consensus_of_three_copies(lam: float, kept: bool) -> None:
    """T tau while lambda (T - 1) < 1, exactly: float32 copies must not decide by how 3 tau is rounded."""
    task_vectors = random_task_vectors(30, 20, tasks=1, dtype=torch.float32).expand(3, 30, 20)
    found = run("consensus_ta", task_vectors, mask_lambda=lam, alpha=1.0).delta
    assert found.equal(3 * task_vectors[0].double() if kept else torch.zeros(30, 20, dtype=torch.float64))


def test_consensus_order_and_size() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4, dtype=torch.float32)
    found = run("consensus_ta", task_vectors).delta
    torch.testing.assert_close(run("consensus_ta", task_vectors[[2, 0, 3, 1]]).delta, found, rtol=1e-12, atol=0)
    torch.testing.assert_close(run("consensus_ta", task_vectors * 4).delta, found * 4, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tasks", [1, 2])
def test_consensus_k_above_the_number_of_experts_is_lowered_with_a_warning(tasks: int) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=tasks)
    found = run("consensus_ta", task_vectors, k=3, alpha=1.0)
    assert_relative(found.delta, reference_consensus(task_vectors.numpy(), k=tasks), 1e-12)
    assert found.warnings == (f"k=3 is more than its {tasks} expert(s): k={tasks} is used",)
    assert not run("consensus_ta", task_vectors, k=tasks).warnings


def test_consensus_of_one_expert_is_that_expert() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1)
    assert run("consensus_ta", task_vectors, alpha=1.0).delta.equal(task_vectors[0])


def test_consensus_frozen_experts() -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    assert_relative(run("consensus_ta", task_vectors).delta, 0.3 * reference_consensus(task_vectors.numpy()), 1e-12)
    assert not run("consensus_ta", torch.zeros(3, 4, 5)).delta.any()
    assert not run("consensus_ta", torch.zeros(3, 4, 5), merge="ties").delta.any()
