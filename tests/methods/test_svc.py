"""Singular value calibration against its transcription, on top of several methods, and what it does by its formula."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge import merge_state_dicts
from acemerge.errors import InputError
from frontier_references import reference_svc
from spectral_cases import SHAPES, Array, check, deltas, error, every_shape, experts, merge, rotation, run, small_model
from spectral_references import reference_actmat, reference_cart, reference_ties, reference_tsv_m


def after(reference: Any, tau: Array, *, inner: str, floor: float | str = "tasks") -> Array:
    return reference_svc(tau, reference(tau), 1 / len(tau) if floor == "tasks" else float(floor))


INNER = {
    "task_arithmetic": lambda tau: 0.3 * tau.sum(0),
    "cart": reference_cart,
    "tsv_m": reference_tsv_m,
    "actmat": reference_actmat,
}


@pytest.mark.parametrize("floor", ["tasks", 0.1, 1.0])
@pytest.mark.parametrize("inner", INNER)
@every_shape
def test_svc_agrees(shape: tuple[int, int], inner: str, floor: float | str) -> None:
    check("svc", experts(3, *shape), partial(after, INNER[inner]), inner=inner, floor=floor)


@given(scale=st.floats(0.01, 100), floor=st.floats(0.01, 2), shape=st.sampled_from(sorted(SHAPES)))
def test_the_scale_of_the_inner_method_cancels_if_the_floor_has_it_too(scale: float, floor: float, shape: str) -> None:
    """Longer experts lengthen the inner merge; that of task arithmetic alone cannot be scaled, that of shorter experts can."""
    task_vectors = experts(3, *SHAPES[shape])
    assert error(merge("svc", scale * task_vectors, floor=floor), scale * merge("svc", task_vectors, floor=floor)) <= 1e-9
    sums = merge("svc", task_vectors, inner="task_arithmetic", floor=0.3 * floor)
    copies = reference_svc(task_vectors.numpy(), task_vectors.sum(0).numpy(), floor)
    assert error(sums, copies) <= 1e-9


@given(floor=st.floats(0.01, 2), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES)))
def test_singular_vectors_stay_and_no_factor_exceeds_one_over_the_floor(floor: float, seed: int, shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape], seed=seed)
    merged = run("svc", task_vectors, floor=floor)
    D = 0.3 * task_vectors.sum(0)
    U, s, Vh = torch.linalg.svd(D, full_matrices=False)
    calibrated = U.T @ merged.delta @ Vh.T
    factors = calibrated.diagonal() / s
    assert torch.linalg.norm(calibrated - calibrated.diagonal().diag()) <= 1e-9 * torch.linalg.norm(calibrated)
    assert float(factors.min()) > 0
    assert float(factors.max()) <= 1 / floor * (1 + 1e-9)
    assert merged.facts["smallest_factor"] == pytest.approx(float(factors.min()))
    assert merged.facts["largest_factor"] == pytest.approx(float(factors.max()))


@pytest.mark.parametrize(("floor", "expected"), [(0.1, 1.0), (0.3, 1.0), (0.6, 0.5), (3.0, 0.1)])
def test_one_expert_comes_back_unless_the_floor_is_above_the_scale(floor: float, expected: float) -> None:
    """Task arithmetic makes it 0.3 tau: min(1, 0.3 / floor) tau."""
    tau = experts(1, 9, 12)
    assert error(merge("svc", tau, floor=floor), expected * tau[0]) <= 1e-9


@every_shape
def test_copies_are_one_expert(shape: tuple[int, int]) -> None:
    tau = experts(1, *shape)
    assert error(merge("svc", tau.repeat(4, 1, 1)), tau[0]) <= 1e-9


@given(seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES)))
def test_rotating_outputs_and_inputs_rotates_the_merge(seed: int, shape: str) -> None:
    rows, cols = SHAPES[shape]
    Q, R, task_vectors = rotation(rows, seed), rotation(cols, seed + 1), experts(3, rows, cols)
    assert error(merge("svc", Q @ task_vectors @ R), Q @ merge("svc", task_vectors) @ R) <= 1e-8


def test_rows_and_columns_are_not_alike() -> None:
    task_vectors = experts(3, 12, 12)
    assert error(merge("svc", task_vectors.mT.contiguous()).T, merge("svc", task_vectors)) > 1e-3


def test_experts_that_write_elsewhere_do_not_count_by_their_rounding() -> None:
    """Disjoint outputs and inputs: each direction belongs to one expert; the other counts as the floor."""
    task_vectors = torch.zeros(2, 10, 8, dtype=torch.float64)
    task_vectors[0, :4, :3], task_vectors[1, 4:, 3:] = experts(1, 4, 3)[0], experts(1, 6, 5, seed=3)[0]
    Q = rotation(10, 5)
    expected = 0.3 * 2 / (0.3 + 0.1) * task_vectors.sum(0)
    assert error(merge("svc", task_vectors, floor=0.1), expected) <= 1e-9
    assert error(merge("svc", Q @ task_vectors, floor=0.1), Q @ expected) <= 1e-9


def test_directions_of_an_isotropic_merge_are_not_unique() -> None:
    assert any("not unique" in warning for warning in run("svc", experts(3, 9, 12), inner="iso_c").warnings)
    assert run("svc", experts(3, 9, 12)).warnings == ()


def test_an_expert_that_changed_nothing_is_left_out() -> None:
    others = experts(3, 10, 14)
    assert error(merge("svc", torch.cat((others, torch.zeros_like(others[:1])))), merge("svc", others)) <= 1e-12


def test_an_inner_method_sees_the_whole_model_first() -> None:
    """The matrices of it: what is not a matrix is averaged, whatever the inner method would do."""
    base, tuned = small_model(torch.float64)
    merged = merge_state_dicts(base, tuned, method="svc", inner="ties", floor=0.5)
    names = ["a.weight", "b.weight", "c.weight"]
    changes = [deltas(base, tuned, name).numpy() for name in names]
    for name, tau, D in zip(names[:2], changes, reference_ties(changes, 0.2, "mean"), strict=False):
        assert error(merged[name] - base[name], reference_svc(tau, D, 0.5)) <= 1e-9
    assert merged["c.weight"].equal(base["c.weight"])
    assert error(merged["d.bias"] - base["d.bias"], deltas(base, tuned, "d.bias").mean(0)) <= 1e-9


@pytest.mark.parametrize("inner", ["svc", "emr", "slerp", "regmean"])
def test_methods_that_cannot_be_inside_are_refused(inner: str) -> None:
    with pytest.raises(InputError, match=f"method 'svc': inner='{inner}' is not allowed"):
        merge("svc", experts(2, 8, 8), inner=inner)
