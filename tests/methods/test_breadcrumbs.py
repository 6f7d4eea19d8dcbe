"""Breadcrumbs against its formula, on single tensors and whole models, and its invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from elementwise_cases import CASES, assert_matches, random_tasks, run
from elementwise_references import breadcrumbs_reference, exact_floor
from small_models import fine_tuned


@pytest.mark.parametrize(("shape", "dtype"), [*CASES, ((3, 40), torch.float32), ((4, 3, 3, 3), torch.float64)])
@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize(("keep", "outliers"), [(0.2, 0.1), (0.15, 0.006), (0.29, 0), (1, 0.3), (0.8, 0.5)])
def test_breadcrumbs_against_its_formula(
    shape: tuple[int, ...], scope: str, keep: float, outliers: float, dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    expected = sum(breadcrumbs_reference(x.double().numpy(), keep, outliers, scope) for x in tau)
    assert_matches(run("breadcrumbs", tau, keep=keep, outliers=outliers, scope=scope).delta, np.asarray(expected), dtype)


def test_breadcrumbs_of_a_whole_model_with_conv1d_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"h.0.attn.c_attn.weight": (20, 24), "h.0.attn.c_attn.bias": (24,), "scale": ()}
    base = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    experts = {t: fine_tuned(base, i) for i, t in enumerate("abc")}
    merged = acemerge.merge_state_dicts(base, experts, method="breadcrumbs", config={"model_type": "gpt2"})
    for name in base:
        taus = [(e[name] - base[name]).double().numpy() for e in experts.values()]
        delta = np.asarray(sum(breadcrumbs_reference(np.asarray(x.T), 0.2, 0.1, "row").T for x in taus))
        np.testing.assert_allclose(merged[name].double().numpy(), base[name].double().numpy() + 0.4 * delta, atol=1e-6)


@given(
    seed=st.integers(0, 999), keep=st.sampled_from([0.1, 0.29, 0.5, 1.0]), outliers=st.sampled_from([0.0, 0.05, 0.3]),
    decimals=st.integers(1, 4),
)  # fmt: skip
def test_breadcrumbs_invariants(seed: int, keep: float, outliers: float, decimals: int) -> None:
    tau = random_tasks(1, 5, 17, seed=seed).round(decimals=decimals)  # with ties
    merged = run("breadcrumbs", tau, keep=keep, outliers=outliers).delta
    assert (merged.count_nonzero(1) <= exact_floor(17, keep)).all()
    removed = exact_floor(17, outliers)
    if removed:
        smallest_outlier = tau[0].abs().sort(dim=1, descending=True).values[:, removed - 1]
        assert (merged.abs().amax(1) <= smallest_outlier).all()
    assert ((merged == 0) | (merged == tau[0])).all()


def test_breadcrumbs_that_removes_nothing_is_task_arithmetic() -> None:
    tau = random_tasks(3, 6, 7)
    for scope in ("row", "tensor"):
        assert run("breadcrumbs", tau, keep=1, outliers=0, scope=scope).delta.equal(run("task_arithmetic", tau).delta)


def test_breadcrumbs_without_outliers_is_a_plain_top_k() -> None:
    """An empty slice at the end of a list is all of it, or nothing."""
    tau = torch.tensor([[[5.0, -4.0, 3.0, 2.0, 1.0]]])
    for scope in ("row", "tensor"):
        for outliers in (0, 0.01):
            assert run("breadcrumbs", tau, keep=0.4, outliers=outliers, scope=scope).delta.tolist() == [[5, -4, 0, 0, 0]]


def test_breadcrumbs_with_all_kept_still_removes_outliers() -> None:
    tau = torch.tensor([[[5.0, -4.0, 3.0, 2.0, 1.0]]])
    assert run("breadcrumbs", tau, keep=1, outliers=0.2).delta.tolist() == [[0, -4, 3, 2, 1]]


def test_breadcrumbs_warns_when_rows_are_too_short_to_keep_anything() -> None:
    merged = run("breadcrumbs", random_tasks(2, 6, 4), keep=0.2)
    assert not merged.delta.any()
    assert merged.warnings == ("keep=0.2 of 4 entries along the last axis is less than one: it stays at the base",)
    assert run("breadcrumbs", random_tasks(2, 6, 4), keep=0.2, scope="tensor").warnings == ()
    assert run("breadcrumbs", random_tasks(2), keep=0.2).warnings == ()
