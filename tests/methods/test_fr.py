"""FR against a plain float64 transcription, and what it must keep to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from acemerge.methods.fr import high_pass
from coefficient_cases import PRECISIONS, Array, assert_relative, random_task_vectors, run, whole_model


def reference_filter(tau: Array, rho: float) -> Array:
    H, W = tau.shape
    F = np.fft.fft2(tau)
    for y in range(H):
        for x in range(W):
            if math.sqrt((y - H // 2) ** 2 + (x - W // 2) ** 2) > rho:
                F[y, x] = 0
    return np.asarray(np.real(np.fft.ifft2(F)))


def reference_fr(taus: Array, c: float = 0.7, side: str = "min", align: bool = True) -> Array:
    H, W = taus[0].shape
    filtered = [reference_filter(tau, c * (min(H, W) if side == "min" else max(H, W))) for tau in taus]
    if align:
        largest = max(np.abs(f).mean() for f in filtered)
        filtered = [f * largest / np.abs(f).mean() for f in filtered]
    return np.asarray(sum(filtered))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", [(12, 8), (10, 10), (7, 12), (9, 9), (4, 40)])
@pytest.mark.parametrize(
    ("c", "side", "align"), [(0.7, "min", True), (0.5, "min", False), (0.6, "max", True), (0.3, "max", False)]
)
def test_fr_formula(dtype: torch.dtype, shape: tuple[int, int], c: float, side: str, align: bool) -> None:
    task_vectors = random_task_vectors(*shape, tasks=4, dtype=dtype)
    found = run("fr", task_vectors, cutoff=c, side=side, align=align, alpha=1.0)
    assert_relative(found.delta, reference_fr(task_vectors.double().numpy(), c, side, align), PRECISIONS[dtype])


def test_fr_defaults() -> None:
    task_vectors = random_task_vectors(12, 8)
    assert_relative(run("fr", task_vectors).delta, 0.7 * reference_fr(task_vectors.numpy()), 1e-12)


def test_fr_cutoff_is_taken_as_written() -> None:
    """0.7 * 90 is 62.999... in floating point; the frequency at distance 63 is kept."""
    filter_ = high_pass(90, 128, 0.7 * 90, torch.device("cpu"))
    assert filter_.gains[45, 1] == 1
    assert filter_.gains[45, 0] == 0


def test_fr_with_a_large_radius_is_task_arithmetic() -> None:
    task_vectors = random_task_vectors(9, 12)
    found = run("fr", task_vectors, cutoff=1.0, align=False, alpha=0.3).delta
    torch.testing.assert_close(found, acemerge.merge_task_vectors(task_vectors, method="task_arithmetic"))


@given(st.integers(2, 9), st.integers(2, 9), st.floats(0.05, 1.5), st.integers(0, 1000))
def test_fr_filter_is_linear_and_never_adds_energy(rows: int, columns: int, c: float, seed: int) -> None:
    a, b = random_task_vectors(rows, columns, tasks=2, seed=seed)
    filter_ = high_pass(rows, columns, c * min(rows, columns), torch.device("cpu"))
    torch.testing.assert_close(filter_(2 * a - 3 * b), 2 * filter_(a) - 3 * filter_(b))
    assert filter_(a).norm() <= a.norm() * (1 + 1e-12)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.05, 1.5), st.integers(0, 1000))
def test_fr_filter_is_idempotent_for_even_sizes(half_rows: int, half_columns: int, c: float, seed: int) -> None:
    rows, columns = 2 * half_rows, 2 * half_columns
    a = random_task_vectors(rows, columns, tasks=1, seed=seed)[0]
    filter_ = high_pass(rows, columns, c * min(rows, columns), torch.device("cpu"))
    torch.testing.assert_close(filter_(filter_(a)), filter_(a), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("align", [True, False])
def test_fr_maps_constants_to_zero(align: bool) -> None:
    """And does not enlarge what rounding leaves of them when it aligns."""
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0.37
    others = run("fr", task_vectors[[0, 2]], align=align).delta
    torch.testing.assert_close(run("fr", task_vectors, align=align).delta, others, rtol=1e-10, atol=1e-12)
    assert run("fr", torch.full((2, 12, 8), 0.37, dtype=torch.float64), align=align).delta.abs().max() < 1e-15


def test_fr_is_transpose_equivariant() -> None:
    task_vectors = random_task_vectors(7, 12)
    torch.testing.assert_close(run("fr", task_vectors.mT.contiguous()).delta, run("fr", task_vectors).delta.T)


def test_fr_order_size_and_copies() -> None:
    task_vectors = random_task_vectors(12, 8)
    found = run("fr", task_vectors).delta
    torch.testing.assert_close(run("fr", task_vectors[[2, 0, 1]]).delta, found)
    torch.testing.assert_close(run("fr", task_vectors * 4).delta, found * 4)
    torch.testing.assert_close(run("fr", task_vectors[[1, 1, 1]]).delta, 3 * run("fr", task_vectors[[1]]).delta)


def test_fr_alignment_gives_every_expert_the_same_mean_magnitude() -> None:
    task_vectors = random_task_vectors(12, 8)
    alone = [run("fr", task_vectors[[t]], align=False, alpha=1.0).delta for t in range(3)]
    largest = max(float(one.abs().mean()) for one in alone)
    expected = sum(one * largest / one.abs().mean() for one in alone)
    torch.testing.assert_close(run("fr", task_vectors, alpha=1.0).delta, expected)


def test_fr_frozen_experts() -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    torch.testing.assert_close(run("fr", task_vectors).delta, run("fr", task_vectors[[0, 2]]).delta)
    assert not run("fr", torch.zeros(3, 4, 5)).delta.any()


def test_fr_cuts_by_shape() -> None:
    """What the docs say of it."""
    cut = {s: 1 - high_pass(*s, 0.7 * 768, torch.device("cpu")).kept for s in [(768, 768), (2304, 768), (3072, 768)]}
    assert round(cut[768, 768], 4) == 0.0002
    assert round(cut[2304, 768], 2) == 0.58
    assert round(cut[3072, 768], 2) == 0.68


def test_fr_leaves_what_is_not_a_matrix_at_the_base() -> None:
    base, experts = whole_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="fr")
    for name in ("layers.0.bias", "scale", "embed.weight"):
        assert merged[name].equal(base[name])
    taus = torch.stack([expert["layers.0.weight"] - base["layers.0.weight"] for expert in experts.values()]).double().numpy()
    assert_relative(merged["layers.0.weight"].double() - base["layers.0.weight"].double(), 0.7 * reference_fr(taus), 1e-5)
