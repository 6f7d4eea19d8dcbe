"""Experts of rank one, and more of them than a matrix has rows: finite results, the same every time."""

from __future__ import annotations

import pytest
import torch

from coefficient_cases import (
    random_task_vectors,
    run,
)


@pytest.mark.parametrize("method", ["consensus_ta", "nan", "fr"])
@pytest.mark.parametrize("tasks", [1, 9])
def test_finite_and_repeatable_for_rank_one_and_many_experts(method: str, tasks: int) -> None:
    task_vectors = random_task_vectors(4, 1, tasks=tasks, dtype=torch.float32) @ random_task_vectors(1, 3, tasks=tasks).float()
    before = task_vectors.clone()
    found = run(method, task_vectors).delta
    assert torch.isfinite(found).all()
    assert found.equal(run(method, task_vectors).delta)
    assert task_vectors.equal(before)
