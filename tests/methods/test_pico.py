"""Pico against its transcription, on top of several methods, and what calibration and length promise."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge import merge_state_dicts
from acemerge.errors import InputError
from acemerge.methods import Context
from acemerge.methods.pico import calibrated
from frontier_references import mean_length, reference_pico_filter
from spectral_cases import SHAPES, Array, check, deltas, error, every_shape, experts, low_rank, merge, rotation, run, small_model
from spectral_references import reference_iso_c, reference_ties, reference_tsv_m


def around(reference: Any, tau: Array, **_: str) -> Array:
    return mean_length(reference(reference_pico_filter(tau)), tau)


INNER = {"task_arithmetic": lambda tau: tau.sum(0), "tsv_m": reference_tsv_m, "iso_c": reference_iso_c}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("tasks", [1, 3])
@every_shape
def test_pico_agrees(shape: tuple[int, int], tasks: int, inner: str) -> None:
    check("pico", experts(tasks, *shape), partial(around, INNER[inner]), inner=inner)


def test_pico_of_adapters_agrees() -> None:
    check("pico", low_rank(3, 30, 24, rank=2), partial(around, INNER["task_arithmetic"]))


@given(tasks=st.integers(2, 5), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES)))
def test_directions_are_toned_down_by_their_share_and_never_below_one_over_the_experts(tasks: int, seed: int, shape: str) -> None:
    task_vectors = experts(tasks, *SHAPES[shape], seed=seed)
    prepared, _ = calibrated(task_vectors, Context())
    U, s, _ = np.linalg.svd(torch.cat(tuple(task_vectors), 1).numpy(), full_matrices=False)
    before = np.linalg.norm(U.T @ torch.cat(tuple(task_vectors), 1).numpy(), axis=1)
    after = np.linalg.norm(U.T @ torch.cat(tuple(prepared), 1).numpy(), axis=1)
    np.testing.assert_allclose(after / before, 1 / (1 + (tasks - 1) * s**2 / np.sum(s**2)), rtol=1e-8)
    assert np.all(after / before >= 1 / tasks - 1e-12)


@given(
    order=st.permutations(range(3)), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES))
)
def test_order_scale_rotations_and_length(order: list[int], scale: float, seed: int, shape: str) -> None:
    rows, cols = SHAPES[shape]
    task_vectors = experts(3, rows, cols)
    expected = merge("pico", task_vectors)
    Q, R = rotation(rows, seed), rotation(cols, seed + 1)
    assert error(merge("pico", scale * Q @ task_vectors[order] @ R), scale * Q @ expected @ R) <= 1e-8
    lengths = torch.linalg.matrix_norm(task_vectors)
    assert float(expected.norm()) == pytest.approx(float(lengths.mean()))


@pytest.mark.parametrize("copies", [1, 3])
def test_one_expert_comes_back_and_its_copies_keep_its_length(copies: int) -> None:
    tau = experts(1, 9, 12)
    merged = merge("pico", tau.repeat(copies, 1, 1))
    assert float(merged.norm()) == pytest.approx(float(tau[0].norm()))
    if copies == 1:
        assert error(merged, tau[0]) <= 1e-12


def test_experts_that_cancel_give_nothing() -> None:
    tau = experts(1, 9, 12)
    merged = run("pico", torch.cat((tau, -tau)))
    assert not merged.delta.any()


def test_rows_and_columns_are_not_alike() -> None:
    task_vectors = experts(3, 12, 12, decay=1.0)
    assert error(merge("pico", task_vectors.mT.contiguous()).T, merge("pico", task_vectors)) > 1e-3


def test_an_expert_that_changed_nothing_is_left_out() -> None:
    others = experts(3, 10, 14)
    assert error(merge("pico", torch.cat((others, torch.zeros_like(others[:1])))), merge("pico", others)) <= 1e-12


def test_an_inner_method_sees_the_calibrated_model_first() -> None:
    base, tuned = small_model(torch.float64)
    merged = merge_state_dicts(base, tuned, method="pico", inner="ties")
    names = ["a.weight", "b.weight", "c.weight"]
    changes = [deltas(base, tuned, name).numpy() for name in names]
    prepared = [*(reference_pico_filter(tau) for tau in changes[:2]), changes[2]]
    for name, tau, M in zip(names[:2], changes, reference_ties(prepared, 0.2, "mean"), strict=False):
        assert error(merged[name] - base[name], mean_length(M, tau)) <= 1e-8


@pytest.mark.parametrize("inner", ["pico", "twin", "fisher"])
def test_methods_that_cannot_be_inside_are_refused(inner: str) -> None:
    with pytest.raises(InputError, match=f"method 'pico': inner='{inner}' is not allowed"):
        merge("pico", experts(2, 8, 8), inner=inner)
