"""DC-Merge against its transcription, and what its blocks, its election and its smoothing promise."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.methods.dc_merge import DcMergeOptions, smooth
from acemerge.numerics.linalg import leading_directions
from frontier_references import reference_dc_merge
from spectral_cases import check, error, experts, low_rank, merge, rotation, run
from spectral_references import polar

SHAPES = ((12, 12), (12, 30), (30, 12))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.mark.parametrize("density", [1e-3, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("tasks", [1, 3, 4])
@every_shape
def test_dc_merge_agrees(shape: tuple[int, int], tasks: int, density: float) -> None:
    check("dc_merge", experts(tasks, *shape), reference_dc_merge, density=density)


@pytest.mark.parametrize(
    "options", [{"smoothing": "average"}, {"smoothing": "linear"}, {"smoothing": "linear", "ratio": 1.5}], ids=str
)
@every_shape
def test_the_branch_for_adapters_agrees(shape: tuple[int, int], options: dict[str, Any]) -> None:
    check("dc_merge", experts(3, *shape, decay=1.0), reference_dc_merge, rank=3, density=0.1, **options)


@given(
    smoothing=st.sampled_from(["average", "linear"]),
    ratio=st.floats(1, 20),
    k=st.integers(1, 9),
    decay=st.floats(0, 3),
)
def test_smoothing_keeps_the_nuclear_norm_and_bounds_the_decay(smoothing: Any, ratio: float, k: int, decay: float) -> None:
    own = leading_directions(experts(1, 9, 12, decay=decay)[0], k)
    values = smooth(own, DcMergeOptions(smoothing=smoothing, ratio=ratio)).values
    assert float(values.sum()) == pytest.approx(float(own.values.sum()))
    limit = min(ratio, float(own.values[-1] / own.values[0])) if smoothing == "linear" else 1.0
    assert float(values[-1] / values[0]) == pytest.approx(limit)


@given(density=st.floats(0.001, 1), seed=st.integers(0, 1000), tasks=st.sampled_from([2, 3, 4]))
def test_nothing_crosses_from_one_experts_block_to_anothers(density: float, seed: int, tasks: int) -> None:
    task_vectors = experts(tasks, 12, 15, seed=seed)
    q = 12 // tasks
    svd = torch.linalg.svd(task_vectors, full_matrices=False)
    P = torch.from_numpy(polar(torch.cat(tuple(svd.U[:, :, :q]), 1).numpy()))
    Q = torch.from_numpy(polar(torch.cat(tuple(svd.Vh[:, :q]), 0).numpy()))
    merged = merge("dc_merge", task_vectors, density=density)
    coordinates = P.T @ merged @ Q.T
    blocks = torch.block_diag(*[torch.ones(q, q, dtype=torch.float64)] * tasks)
    assert torch.linalg.norm(coordinates * (1 - blocks)) <= 1e-9 * torch.linalg.norm(merged)


def test_experts_without_interference_are_summed() -> None:
    task_vectors = torch.zeros(3, 12, 15, dtype=torch.float64)
    for t in range(3):
        task_vectors[t, 4 * t : 4 * t + 4, 5 * t : 5 * t + 4] = experts(1, 4, 4, seed=t)[0]
    Q, R = rotation(12, 1), rotation(15, 2)
    assert error(merge("dc_merge", Q @ task_vectors @ R, density=0.5), Q @ task_vectors.sum(0) @ R) <= 1e-9


@given(
    order=st.permutations(range(3)),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
    shape=st.sampled_from(SHAPES),
    density=st.sampled_from([1e-3, 0.1]),
)
def test_order_scale_rotations_and_transposes(
    order: list[int], scale: float, seed: int, shape: tuple[int, int], density: float
) -> None:
    task_vectors = experts(3, *shape)
    expected = merge("dc_merge", task_vectors, density=density)
    Q, R = rotation(shape[0], seed), rotation(shape[1], seed + 1)
    turned = scale * Q @ task_vectors[order] @ R
    assert error(merge("dc_merge", turned, density=density), scale * Q @ expected @ R) <= 1e-8
    assert error(merge("dc_merge", task_vectors.mT.contiguous(), density=density).T, expected) <= 1e-8


def test_one_expert_does_not_come_back_but_its_largest_coordinates_do() -> None:
    tau = experts(1, 9, 12, decay=1.0)
    merged = run("dc_merge", tau, density=3 / 81)
    values = torch.linalg.svdvals(tau[0])
    torch.testing.assert_close(torch.linalg.svdvals(merged.delta)[:3], values[:3])
    assert merged.facts["coordinates_each"] == 3


def test_a_number_of_experts_that_does_not_divide_the_directions() -> None:
    merged = run("dc_merge", experts(5, 12, 15), density=0.1)
    assert merged.facts["directions_each"] == 2
    assert torch.linalg.matrix_rank(merged.delta) <= 10


def test_copies_and_experts_that_changed_nothing() -> None:
    tau = low_rank(2, 30, 24, rank=2)
    with_zero = torch.cat((tau, torch.zeros_like(tau[:1])))
    assert error(merge("dc_merge", with_zero, density=0.1), merge("dc_merge", tau, density=0.1)) <= 1e-12
    copies = run("dc_merge", tau[:1].repeat(3, 1, 1), density=0.1)
    assert any("share leading directions" in warning for warning in copies.warnings)
    assert torch.isfinite(copies.delta).all()


def test_more_experts_than_directions_leave_the_base() -> None:
    merged = run("dc_merge", experts(5, 4, 9))
    assert not merged.delta.any()
    assert "stays at the base" in merged.warnings[0]
