"""EMR, TALL masks and Twin make one model per task: the formulas, and what they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acemerge.methods import get_method
from per_task_cases import (
    PRECISIONS,
    REFERENCES,
    SHAPES,
    VARIANTS,
    changes,
    every_method,
    random_task_vectors,
    reference_shared,
    run,
)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_formula(method: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for tasks in (1, 2, 5):
        task_vectors = random_task_vectors(*shape, tasks=tasks, dtype=dtype)
        expected = REFERENCES[method]({"layer": task_vectors.double().numpy()}, **options)
        size = task_vectors.double().norm()
        for found, wanted in zip(changes(method, task_vectors, **options), expected, strict=True):
            assert (found.double() - torch.from_numpy(wanted["layer"])).norm() <= PRECISIONS[dtype] * size
        shared = torch.from_numpy(reference_shared(method, task_vectors.double().numpy()))
        alpha = options.get("alpha", get_method(method).options({}).alpha)
        assert (run(method, task_vectors, **options).delta - alpha * shared).norm() <= PRECISIONS[dtype] * size


@every_method
def test_one_expert_gives_that_expert_back(method: str) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1)
    options = {"rank_share": 1.0} if method == "twin" else {}
    torch.testing.assert_close(changes(method, task_vectors, **options)[0], task_vectors[0])


@every_method
def test_order_of_experts(method: str) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4, dtype=torch.float32)
    order = [2, 0, 3, 1]
    straight, turned = changes(method, task_vectors), changes(method, task_vectors[order])
    for place, task in enumerate(order):
        torch.testing.assert_close(turned[place], straight[task], rtol=1e-9, atol=1e-12)


@every_method
def test_size_of_the_task_vectors(method: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    for small, large in zip(changes(method, task_vectors), changes(method, 4 * task_vectors), strict=True):
        torch.testing.assert_close(large, 4 * small)


@every_method
def test_transpose_equivariant(method: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    for one, other in zip(changes(method, task_vectors), changes(method, task_vectors.mT.contiguous()), strict=True):
        torch.testing.assert_close(other, one.T)


@every_method
def test_frozen_experts(method: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    expected = REFERENCES[method]({"layer": task_vectors.numpy()})
    for found, wanted in zip(changes(method, task_vectors), expected, strict=True):
        torch.testing.assert_close(found, torch.from_numpy(wanted["layer"]))
    assert not any(change.any() for change in changes(method, torch.zeros(3, 4, 5)))


@every_method
def test_rank_one_experts_more_of_them_than_rows(method: str) -> None:
    task_vectors = random_task_vectors(4, 1, tasks=9) @ random_task_vectors(1, 3, tasks=9, seed=1)
    before = task_vectors.clone()
    first, second = changes(method, task_vectors), changes(method, task_vectors)
    assert all(torch.isfinite(a).all() and a.equal(b) for a, b in zip(first, second, strict=True))
    assert task_vectors.equal(before)


@every_method
def test_parts_do_not_share_memory_with_the_inputs(method: str) -> None:
    task_vectors = random_task_vectors(6)
    memory = task_vectors.untyped_storage().data_ptr()
    merged = run(method, task_vectors, alpha=0.0)
    for part in (value for own in merged.parts for value in own.values()):
        assert part.untyped_storage().data_ptr() != memory
