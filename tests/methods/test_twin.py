"""Twin: how much of each expert is kept beside the shared model."""

from __future__ import annotations

import pytest
import torch

from per_task_cases import changes, random_task_vectors, run


def test_twin_with_every_direction_is_the_expert() -> None:
    task_vectors = random_task_vectors(12, 8)
    for found, tau in zip(changes("twin", task_vectors, rank_share=1.0), task_vectors, strict=True):
        torch.testing.assert_close(found, tau)


def test_twin_with_no_direction_is_the_shared_model() -> None:
    task_vectors = random_task_vectors(12, 8)
    assert all(found.equal(0.3 * task_vectors.sum(0)) for found in changes("twin", task_vectors, rank_share=0.0))


@pytest.mark.parametrize(("rank_share", "rank"), [(0.1, 1), (0.05, 1), (0.3, 3), (0.29, 2), (0.7, 7)])
def test_twin_rank(rank_share: float, rank: int) -> None:
    """(1 - 0.9) * 10 is 0.999... in floating point, yet one direction."""
    merged = run("twin", random_task_vectors(10, 40), rank_share=rank_share)
    assert {own["left"].shape for own in merged.parts} == {(10, rank)}
    assert {own["right"].shape for own in merged.parts} == {(rank, 40)}


def test_twin_keeps_what_is_not_a_matrix_whole() -> None:
    task_vectors = random_task_vectors(7)
    for found, tau in zip(changes("twin", task_vectors), task_vectors, strict=True):
        torch.testing.assert_close(found, tau)


def test_twin_stores_what_is_smaller() -> None:
    task_vectors = random_task_vectors(8, 8)
    assert all(own.keys() == {"left", "right"} for own in run("twin", task_vectors, rank_share=0.4).parts)
    assert all(own.keys() == {"delta"} for own in run("twin", task_vectors, rank_share=0.6).parts)
