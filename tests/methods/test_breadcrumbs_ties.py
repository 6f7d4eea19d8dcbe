"""Breadcrumbs with TIES against its formula, on single tensors and whole models, and beside the methods it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import acemerge
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model
from elementwise_references import exact_floor


def crumbs_reference(tau: Array, keep: float, outliers: float) -> Array:
    """Without the smallest, then without as many of the largest as the share that stays allows."""
    flat, n = tau.reshape(-1), tau.size
    kept = exact_floor(n, keep)
    smallest = max(0, n - kept - exact_floor(n, outliers))
    order = sorted(range(n), key=lambda j: (abs(flat[j]), -j))[smallest : smallest + kept]
    out = np.zeros(n)
    out[order] = flat[order]
    return out.reshape(tau.shape)


def breadcrumbs_ties_reference(taus: Array, keep: float, outliers: float, merge: str, weights: Sequence[float]) -> Array:
    weighted = np.array([w * crumbs_reference(tau, keep, outliers) for w, tau in zip(weights, taus, strict=True)])
    merged = np.zeros(taus.shape[1:])
    for index in np.ndindex(merged.shape):
        values = weighted[(slice(None), *index)]
        sign = 1.0 if math.fsum(values) >= 0 else -1.0
        agreeing = [t for t, value in enumerate(values) if np.sign(value) == sign]
        share = sum(abs(weights[t]) for t in agreeing) if merge == "mean" else 1
        merged[index] = sum(values[t] for t in agreeing) / (share or 1)
    return merged


@every_case
@pytest.mark.parametrize("merge", ["sum", "mean"])
@pytest.mark.parametrize("weights", [(1, 1, 1), (0.2, 3, -0.5)])
@pytest.mark.parametrize(("keep", "outliers"), [(0.9, 0.01), (0.29, 0.1), (0.8, 0.5), (1, 0.3), (0.5, 0)])
def test_breadcrumbs_ties_against_its_formula(
    shape: tuple[int, ...], merge: str, weights: tuple[float, ...], keep: float, outliers: float, dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    expected = breadcrumbs_ties_reference(tau.double().numpy(), keep, outliers, merge, weights)
    found = run("breadcrumbs_ties", tau, keep=keep, outliers=outliers, merge=merge, weights=weights)
    assert_matches(found.delta, expected, dtype)


def test_breadcrumbs_ties_of_a_whole_model() -> None:
    base, experts = small_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="breadcrumbs_ties", keep=0.5, outliers=0.1, weights=[0.5, 0.3, 0.2])
    for name, value in merged.items():
        if value.is_floating_point():
            taus = np.stack([(e[name] - base[name]).double().numpy() for e in experts.values()])
            delta = breadcrumbs_ties_reference(taus, 0.5, 0.1, "sum", (0.5, 0.3, 0.2))
            np.testing.assert_allclose(value.double().numpy(), base[name].double().numpy() + delta, rtol=1e-5, atol=1e-6)


def test_one_expert_is_what_breadcrumbs_leaves_of_it() -> None:
    tau = random_tasks(1, 6, 7)
    options: dict[str, Any] = {"keep": 0.4, "outliers": 0.1}
    torch.testing.assert_close(
        run("breadcrumbs_ties", tau, **options).delta, run("breadcrumbs", tau, scope="tensor", **options).delta
    )


def test_with_everything_kept_it_is_untrimmed_ties() -> None:
    tau = random_tasks(3, 6, 7)
    for merge in ("mean", "sum"):
        found = run("breadcrumbs_ties", tau, keep=1, outliers=0.5, merge=merge).delta
        torch.testing.assert_close(found, run("ties", tau, keep=1, merge=merge).delta)


def test_the_share_kept_goes_before_the_outliers() -> None:
    tau = torch.tensor([[[5.0, -4.0, 3.0, 2.0, 1.0]]])
    assert run("breadcrumbs_ties", tau, keep=0.8, outliers=0.4).delta.tolist() == [[0, -4, 3, 2, 1]]


def test_a_tensor_too_small_to_keep_anything_of_stays_at_the_base() -> None:
    merged = run("breadcrumbs_ties", random_tasks(2, 4), keep=0.2)
    assert not merged.delta.any()
    assert merged.warnings == ("keep=0.2 of 4 entries in the tensor is less than one: it stays at the base",)
    assert run("breadcrumbs_ties", torch.zeros(2, 0, 3)).delta.shape == (0, 3)
