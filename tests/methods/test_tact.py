"""TACT against its transcription, and what trimming the covariance keeps and loses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_references import reference_tact
from spectral_cases import SHAPES, check, error, every_shape, experts, merge, rotation


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.7])
@pytest.mark.parametrize("tasks", [1, 3, 6])
@every_shape
def test_tact_agrees(shape: tuple[int, int], tasks: int, keep: float) -> None:
    check("tact", experts(tasks, *shape), reference_tact, keep=keep)


@pytest.mark.parametrize("rtol", [1e-9, 1e-4, 0.05])
@every_shape
def test_tact_agrees_for_each_cut(shape: tuple[int, int], rtol: float) -> None:
    check("tact", experts(3, *shape, decay=1.0), reference_tact, rtol=rtol)


@every_shape
def test_untrimmed_it_is_actmat(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    assert error(merge("tact", task_vectors, keep=1.0), merge("actmat", task_vectors)) <= 1e-9


def test_one_expert_comes_back_if_its_trimmed_covariance_has_full_rank() -> None:
    tau = experts(1, 20, 9)
    assert error(merge("tact", tau), tau[0]) <= 1e-9


def test_one_expert_is_projected_on_the_range_of_its_trimmed_covariance() -> None:
    tau = experts(1, 4, 40)
    kept = tau[0].abs() >= tau[0].abs().flatten().sort(descending=True).values[79]
    rows = torch.linalg.svd(tau[0] * kept, full_matrices=False).Vh
    assert error(merge("tact", tau), tau[0] @ rows.T @ rows) <= 1e-9


@given(
    order=st.permutations(range(3)), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES))
)
def test_order_scale_and_permutations(order: list[int], scale: float, seed: int, shape: str) -> None:
    rows, cols = SHAPES[shape]
    task_vectors = experts(3, rows, cols)
    expected = merge("tact", task_vectors)
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randperm(rows, generator=generator), torch.randperm(cols, generator=generator)
    assert error(merge("tact", scale * task_vectors[order][:, p][:, :, q]), scale * expected[p][:, q]) <= 1e-8


def test_rotations_do_not_go_through() -> None:
    task_vectors = experts(3, 12, 12)
    R = rotation(12, 1)
    assert error(merge("tact", task_vectors @ R), merge("tact", task_vectors) @ R) > 1e-2


@pytest.mark.parametrize("position", [0, 2])
def test_an_expert_that_changed_nothing_is_left_out(position: int) -> None:
    others = experts(3, 10, 14)
    with_zero = torch.cat((others[:position], torch.zeros_like(others[:1]), others[position:]))
    assert error(merge("tact", with_zero), merge("tact", others)) <= 1e-12
