"""Iso-C against its transcription, and what follows from the formula."""

import numpy as np
import pytest
import torch

from spectral_cases import TOLERANCE, check, error, every_shape, experts, low_rank, merge, rotation, run
from spectral_references import reference_iso_c


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 5])
@every_shape
def test_iso_c_agrees(shape: tuple[int, int], tasks: int, decay: float) -> None:
    check("iso_c", experts(tasks, *shape, decay=decay), reference_iso_c)


def test_iso_c_agrees_on_a_steep_spectrum() -> None:
    """Weak directions get the same weight as strong ones: they have to be right too."""
    total = rotation(20, 1) @ torch.diag(10.0 ** -torch.linspace(0, 6, 20, dtype=torch.float64)) @ rotation(20, 2)
    assert error(merge("iso_c", total[None]), reference_iso_c(total[None].numpy())) <= 1e-7


@every_shape
def test_iso_c_flattens_the_spectrum_and_keeps_its_sum(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    before, after = (torch.linalg.svdvals(x) for x in (task_vectors.sum(0), merge("iso_c", task_vectors)))
    torch.testing.assert_close(after, before.mean().expand_as(after))
    assert float(after.sum()) == pytest.approx(float(before.sum()))


def test_iso_c_is_the_polar_factor_of_the_sum() -> None:
    task_vectors = experts(3, 14, 12)
    product = merge("iso_c", task_vectors).T @ task_vectors.sum(0)
    torch.testing.assert_close(product, product.T)
    assert torch.linalg.eigvalsh(product).min() > 0


def test_iso_c_of_one_expert_is_not_that_expert() -> None:
    task_vectors = experts(1, 14, 12)
    assert error(merge("iso_c", task_vectors), task_vectors[0]) > 0.1


def test_iso_c_of_copies_is_the_flattened_multiple() -> None:
    one = experts(1, 14, 12)
    assert error(merge("iso_c", one.repeat(3, 1, 1)), 3 * merge("iso_c", one)) <= 1e-12


def test_iso_c_of_opposite_experts_is_nothing() -> None:
    one = experts(1, 14, 12)
    assert not merge("iso_c", torch.cat((one, -one))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iso_c_gives_directions_that_nobody_has_no_weight(dtype: torch.dtype) -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    u, s, vh = np.linalg.svd(task_vectors.sum(0).numpy(), full_matrices=False)
    merged = run("iso_c", task_vectors.to(dtype))
    assert error(merged.delta, s.mean() * u[:, :6] @ vh[:6]) <= TOLERANCE[dtype]
    assert merged.facts["rank"] == 6
    assert "rank 6 of 24" in merged.warnings[0]
