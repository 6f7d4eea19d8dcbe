"""Subspace boosting against its transcription, and what it does to a spectrum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_references import reference_boosting
from spectral_cases import SHAPES, Array, check, error, every_shape, experts, low_rank, merge, rotation, run
from spectral_references import reference_cart


def after_sum(tau: Array, *, share: float) -> Array:
    return reference_boosting(0.3 * tau.sum(0), share)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
@every_shape
def test_boosting_agrees(shape: tuple[int, int], share: float) -> None:
    check("subspace_boosting", experts(3, *shape), after_sum, share=share)
    expected = reference_boosting(reference_cart(experts(3, *shape).numpy()), share)
    assert error(merge("subspace_boosting", experts(3, *shape), share=share, inner="cart"), expected) <= 1e-9


@given(share=st.floats(0, 1), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES)))
def test_values_are_raised_to_one_of_them_and_never_lowered(share: float, seed: int, shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape], seed=seed)
    merged = run("subspace_boosting", task_vectors, share=share)
    before, after = torch.linalg.svdvals(0.3 * task_vectors.sum(0)), torch.linalg.svdvals(merged.delta)
    level = float(merged.facts["singular_value"])
    torch.testing.assert_close(after, before.clamp(min=level))
    assert float((before / level - 1).abs().min()) <= 1e-9
    assert merged.facts["longer"] == pytest.approx(float(after.norm() / before.norm()))


def test_of_no_share_the_spectrum_is_flat_and_of_all_of_it_unchanged() -> None:
    task_vectors = experts(3, 9, 12)
    top = torch.linalg.svdvals(0.3 * task_vectors.sum(0))[0]
    torch.testing.assert_close(torch.linalg.svdvals(merge("subspace_boosting", task_vectors, share=0.0)), top.expand(9))
    assert error(merge("subspace_boosting", task_vectors, share=1.0), 0.3 * task_vectors.sum(0)) <= 1e-9


def test_directions_that_the_merge_does_not_have_get_nothing() -> None:
    merged = merge("subspace_boosting", low_rank(3, 30, 24, rank=2), share=0.0)
    values = torch.linalg.svdvals(merged)
    torch.testing.assert_close(values[:6], values[0].expand(6))
    assert values[6] <= 1e-10 * values[0]


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), shape=st.sampled_from(sorted(SHAPES)))
def test_rotations_scales_and_transposes_go_through(seed: int, scale: float, shape: str) -> None:
    rows, cols = SHAPES[shape]
    Q, R, task_vectors = rotation(rows, seed), rotation(cols, seed + 1), experts(3, rows, cols)
    expected = merge("subspace_boosting", task_vectors)
    assert error(merge("subspace_boosting", scale * Q @ task_vectors @ R), scale * Q @ expected @ R) <= 1e-8
    assert error(merge("subspace_boosting", task_vectors.mT.contiguous()).T, expected) <= 1e-8
