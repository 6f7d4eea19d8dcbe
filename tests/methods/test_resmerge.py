"""ResMerge against its transcription, and what follows from its formula."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_references import reference_resmerge
from spectral_cases import SHAPES, check, error, every_shape, experts, gaussian, low_rank, merge, rotation, run
from spectral_references import truncated


@pytest.mark.parametrize("options", [{}, {"directions": 2}, {"head_share": 0.0}, {"head_share": 1.5, "trust": 1.0}], ids=str)
@pytest.mark.parametrize("tasks", [1, 2, 5])
@every_shape
def test_resmerge_agrees(shape: tuple[int, int], tasks: int, options: dict[str, Any]) -> None:
    unrelated = experts(tasks, *shape)
    check("resmerge", unrelated, reference_resmerge, **options)
    check("resmerge", unrelated + 0.05 * gaussian(*shape, seed=9), reference_resmerge, **options)  # these agree


@pytest.mark.parametrize("copies", [1, 4])
@every_shape
def test_one_expert_or_its_copies_are_its_residual_and_some_of_its_head(shape: tuple[int, int], copies: int) -> None:
    tau = experts(1, *shape)
    H = torch.from_numpy(truncated(tau[0].numpy(), 1))
    R = tau[0] - H
    expected = R + 0.2 * R.norm() * H / H.norm()
    assert error(merge("resmerge", tau.repeat(copies, 1, 1)), expected) <= 1e-8


@given(seed=st.integers(0, 1000), common=st.floats(0, 3), shape=st.sampled_from(sorted(SHAPES)))
def test_the_heads_part_is_short_and_the_residuals_no_longer_than_their_mean(seed: int, common: float, shape: str) -> None:
    rows, cols = SHAPES[shape]
    task_vectors = gaussian(3, rows, cols, seed=seed) + common * gaussian(rows, cols, seed=seed + 1)
    A = merge("resmerge", task_vectors, head_share=0.0)
    C = merge("resmerge", task_vectors) - A
    lengths = [float((tau - torch.from_numpy(truncated(tau.numpy(), 1))).norm()) for tau in task_vectors]
    assert float(C.norm()) <= 0.2 * float(A.norm()) * (1 + 1e-9)
    assert float(A.norm()) <= sum(lengths) / 3 * (1 + 1e-9)


@given(
    order=st.permutations(range(3)), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES))
)
def test_order_scale_rotations_and_transposes(order: list[int], scale: float, seed: int, shape: str) -> None:
    rows, cols = SHAPES[shape]
    task_vectors = experts(3, rows, cols)
    expected = merge("resmerge", task_vectors)
    Q, R = rotation(rows, seed), rotation(cols, seed + 1)
    assert error(merge("resmerge", scale * Q @ task_vectors[order] @ R), scale * Q @ expected @ R) <= 1e-8
    assert error(merge("resmerge", task_vectors.mT.contiguous()).T, expected) <= 1e-8


def test_facts_tell_unrelated_experts_from_copies() -> None:
    unrelated = run("resmerge", gaussian(4, 60, 60)).facts
    assert unrelated["agreement"] == pytest.approx(0.5, abs=0.02)
    assert unrelated["head_agreement"] == pytest.approx(0, abs=0.2)
    copies = run("resmerge", gaussian(1, 60, 60).repeat(4, 1, 1)).facts
    assert copies["agreement"] == pytest.approx(1)
    assert copies["head_agreement"] == pytest.approx(1)


def test_experts_that_are_their_heads_have_no_residual() -> None:
    assert merge("resmerge", low_rank(3, 20, 16, rank=1)).norm() <= 1e-6 * low_rank(3, 20, 16, rank=1).norm()


def test_opposite_heads_cancel() -> None:
    tau = experts(1, 9, 12)
    H = torch.from_numpy(truncated(tau[0].numpy(), 1))
    other = tau[0] - 2 * H
    assert error(merge("resmerge", torch.stack((tau[0], other))), tau[0] - H) <= 1e-8


def test_an_expert_that_changed_nothing_is_left_out() -> None:
    others = experts(3, 10, 14)
    assert error(merge("resmerge", torch.cat((others, torch.zeros_like(others[:1])))), merge("resmerge", others)) <= 1e-12
