"""DARE with task arithmetic against its formula: which entries are dropped, and what stays of the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import acemerge
from acemerge.numerics.dropping import l1_norm
from elementwise_cases import NAMES, assert_matches, draws, every_case, mean_over_seeds, random_tasks, run, small_model
from elementwise_references import dare_reference


@every_case
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
def test_dare_task_arithmetic_against_its_formula(shape: tuple[int, ...], p: float, rescale: str, dtype: torch.dtype) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    merged = run("dare_task_arithmetic", tau, drop=p, rescale=rescale, seed=5).delta
    expected = sum(dare_reference(tau[t].double().numpy(), draws("w", NAMES[t], shape, 5), p, rescale) for t in range(3))
    assert_matches(merged, np.asarray(expected), dtype)


def test_dare_task_arithmetic_of_a_whole_model() -> None:
    base, experts = small_model()
    merged = acemerge.merge_state_dicts(base, experts, method="dare_task_arithmetic", drop=0.5, seed=3)
    for name, value in merged.items():
        if value.is_floating_point():
            taus = {t: e[name].double().numpy() - base[name].double().numpy() for t, e in experts.items()}
            delta = sum(dare_reference(tau, draws(name, t, base[name].shape, 3), 0.5, "inverse") for t, tau in taus.items())
            np.testing.assert_allclose(value.double().numpy(), base[name].double().numpy() + 0.3 * delta, atol=1e-6)


def test_dare_without_dropping_is_task_arithmetic_and_ties() -> None:
    base, experts = small_model()
    for plain, dropping in (("task_arithmetic", "dare_task_arithmetic"), ("ties", "dare_ties")):
        expected = acemerge.merge_state_dicts(base, experts, method=plain)
        for rescale in ("inverse", "l1"):
            merged = acemerge.merge_state_dicts(base, experts, method=dropping, drop=0, rescale=rescale)
            assert all(merged[name].equal(expected[name]) for name in base)


def test_dare_keeps_the_expectation() -> None:
    tau, p, repeats = random_tasks(1, 4, 5), 0.6, 400
    mean = mean_over_seeds("dare_task_arithmetic", tau, repeats, drop=p)
    deviation = tau[0].abs() * math.sqrt(p / ((1 - p) * repeats))
    assert ((mean - tau[0]).abs() < 5 * deviation).all()


def test_dare_drops_the_share_it_says() -> None:
    tau = random_tasks(1, 200, 200)
    zeros = float((run("dare_task_arithmetic", tau, drop=0.7).delta == 0).double().mean())
    assert zeros == pytest.approx(0.7, abs=5 * math.sqrt(0.21) / 200)


def test_dare_l1_flavour_keeps_the_l1_norm() -> None:
    tau = random_tasks(1, 9, 8)
    merged = run("dare_task_arithmetic", tau, drop=0.6, rescale="l1").delta
    assert l1_norm(merged) == pytest.approx(l1_norm(tau), rel=1e-12)


def test_dare_l1_flavour_when_nothing_is_left() -> None:
    tau = random_tasks(1)
    seed = next(s for s in range(100) if draws("w", "a", (), s) >= 0.5)
    assert float(run("dare_task_arithmetic", tau, drop=0.5, rescale="l1", seed=seed).delta) == 0


def test_dare_masks_are_independent_and_belong_to_names() -> None:
    ones = torch.ones(2, 40, 40)
    both = run("dare_task_arithmetic", ones, drop=0.5, rescale="none").delta
    assert set(both.reshape(-1).tolist()) == {0.0, 1.0, 2.0}
    alone = run("dare_task_arithmetic", ones[1:], names=("b",), drop=0.5, rescale="none").delta
    first = run("dare_task_arithmetic", ones[:1], drop=0.5, rescale="none").delta
    assert both.equal(first + alone)  # an expert's mask does not depend on who else is there
    other_seed = run("dare_task_arithmetic", ones[:1], drop=0.5, rescale="none", seed=1).delta
    other_tensor = run("dare_task_arithmetic", ones[:1], drop=0.5, rescale="none", tensor="v").delta
    for other in (other_seed, other_tensor, alone):
        assert float((first == other).double().mean()) == pytest.approx(0.5, abs=0.07)


def test_dare_masks_do_not_depend_on_the_dtype() -> None:
    tau = random_tasks(1, 30, 30)
    wide, narrow = (run("dare_task_arithmetic", x, drop=0.37).delta for x in (tau, tau.float()))
    assert (wide == 0).equal(narrow == 0)


def test_dare_is_homogeneous() -> None:
    tau = random_tasks(3, 9, 8)
    for rescale in ("inverse", "l1", "none"):
        small = run("dare_task_arithmetic", 1e-12 * tau, drop=0.6, rescale=rescale).delta
        torch.testing.assert_close(
            small, 1e-12 * run("dare_task_arithmetic", tau, drop=0.6, rescale=rescale).delta, atol=0, rtol=1e-9
        )


@pytest.mark.parametrize("name", ["dare_task_arithmetic", "dare_ties"])
def test_dare_can_leave_vectors_whole(name: str) -> None:
    plain = {"dare_task_arithmetic": "task_arithmetic", "dare_ties": "ties"}[name]
    for shape in ((), (9,)):
        tau = random_tasks(3, *shape)
        torch.testing.assert_close(run(name, tau, drop=0.9, drop_vectors=False).delta, run(plain, tau).delta)
    tau = random_tasks(3, 9, 1)
    assert run(name, tau, drop=0.9, drop_vectors=False).delta.equal(run(name, tau, drop=0.9).delta)
