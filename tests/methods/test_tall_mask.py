"""TALL masks: which entries a task keeps."""

from __future__ import annotations

import itertools

import torch

import acemerge
from per_task_cases import changes, random_task_vectors, run


def test_tall_masks_of_disjoint_supports_are_the_supports() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=2)
    task_vectors[0, :6] = 0
    task_vectors[1, 6:] = 0
    for found, tau in zip(changes("tall_mask", task_vectors), task_vectors, strict=True):
        assert found.equal(tau)


def test_tall_mask_raising_lambda_never_adds_entries() -> None:
    task_vectors = random_task_vectors(12, 8)
    masks = [run("tall_mask", task_vectors, mask_lambda=lam).parts[0]["mask"] for lam in (0.0, 0.2, 0.6, 2.0)]
    assert all(bool((more | ~fewer).all()) for more, fewer in itertools.pairwise(masks))


def test_tall_mask_of_ties() -> None:
    """tau_M is TIES with the sum of what agrees; the masks compare it with the whole task vectors."""
    task_vectors = random_task_vectors(12, 8)
    tau_M = acemerge.merge_task_vectors(task_vectors, method="ties", merge="sum", keep=0.3, alpha=1.0)
    for found, tau in zip(changes("tall_mask", task_vectors, merge="ties", keep=0.3), task_vectors, strict=True):
        torch.testing.assert_close(found, tau_M * (tau.abs() > 0.4 * (tau_M - tau).abs()))
