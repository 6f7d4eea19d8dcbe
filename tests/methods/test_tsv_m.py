"""TSV-M against its transcription, and what follows from the formula."""

import numpy as np
import pytest
import torch

from acemerge.methods.tsv_m import orthogonalise
from acemerge.numerics import linalg
from spectral_cases import TOLERANCE, check, error, every_shape, experts, gaussian, generator, low_rank, merge, rotation, run
from spectral_references import polar, reference_tsv_m, truncated


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 3, 4])
@every_shape
def test_tsv_m_agrees(shape: tuple[int, int], tasks: int, decay: float) -> None:
    check("tsv_m", experts(tasks, *shape, decay=decay), reference_tsv_m)


def test_tsv_m_agrees_at_a_larger_size() -> None:
    check("tsv_m", experts(5, 64, 96, decay=1.0), reference_tsv_m)


@every_shape
def test_tsv_m_of_one_expert_is_that_expert(shape: tuple[int, int]) -> None:
    task_vectors = experts(1, *shape)
    assert error(merge("tsv_m", task_vectors), task_vectors[0]) <= 1e-12


@every_shape
def test_tsv_m_has_the_kept_singular_values(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    k = min(shape) // 3
    kept = torch.linalg.svdvals(task_vectors)[:, :k].flatten().sort(descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(merge("tsv_m", task_vectors))[: 3 * k], kept)


def test_orthogonalised_directions_are_orthonormal() -> None:
    directions = [linalg.leading_directions(delta, 4) for delta in experts(3, 20, 13)]
    together = orthogonalise(directions)
    assert torch.dist(together.left.T @ together.left, torch.eye(12, dtype=torch.float64)) <= 1e-10
    assert torch.dist(together.right.T @ together.right, torch.eye(12, dtype=torch.float64)) <= 1e-10
    assert together.warnings == ()


def test_tsv_m_of_experts_that_do_not_interfere_is_the_sum_of_their_truncations() -> None:
    Q, R = rotation(12, 1), rotation(15, 2)
    blocks = [Q[:, 4 * t : 4 * t + 4] @ gaussian(4, 5, seed=t) @ R[:, 5 * t : 5 * t + 5].T for t in range(3)]
    expected = sum(truncated(block.numpy(), 4) for block in blocks)
    assert error(merge("tsv_m", torch.stack(blocks)), np.asarray(expected)) <= 1e-9


def test_tsv_m_of_more_experts_than_directions_leaves_the_base() -> None:
    merged = run("tsv_m", experts(5, 4, 30))
    assert not merged.delta.any()
    assert "stays at the base" in merged.warnings[0]


@pytest.mark.parametrize("copies", [2, 3])
def test_tsv_m_of_copies_is_their_common_truncation_and_says_so(copies: int) -> None:
    one = experts(1, 14, 12)
    merged = run("tsv_m", one.repeat(copies, 1, 1))
    assert error(merged.delta, truncated(one[0].numpy(), 12 // copies)) <= 1e-9
    assert "share leading directions" in merged.warnings[0]


def test_tsv_m_does_not_amplify_rounding_between_copies() -> None:
    one = experts(1, 40, 32, decay=0.2).float()
    noisy = torch.cat((one, one * (1 + 1e-7 * torch.randn(40, 32, generator=generator(3)))))
    merged = run("tsv_m", noisy)
    assert error(merged.delta, truncated(one[0].double().numpy(), 16)) <= 1e-4
    assert "share leading directions" in merged.warnings[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tsv_m_of_low_rank_experts_uses_only_the_directions_they_have(dtype: torch.dtype) -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    factors = [np.linalg.svd(delta, full_matrices=False) for delta in task_vectors.numpy()]
    X = np.concatenate([u[:, :2] for u, _, _ in factors], axis=1)
    Y = np.concatenate([vh[:2] for _, _, vh in factors], axis=0)
    expected = polar(X) @ np.diag(np.concatenate([s[:2] for _, s, _ in factors])) @ polar(Y)
    merged = run("tsv_m", task_vectors.to(dtype))
    assert error(merged.delta, expected) <= TOLERANCE[dtype]
    assert "3 of 3 experts have rank below 8" in merged.warnings[0]
