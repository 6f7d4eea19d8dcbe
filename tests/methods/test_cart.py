"""CART against its transcription, and what follows from the formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectral_cases import check, error, every_shape, experts, gaussian, merge, run
from spectral_references import reference_cart


@pytest.mark.parametrize("rank", [0.12, 0.29, 0.5, 1.0])
@pytest.mark.parametrize("tasks", [1, 3, 5])
@every_shape
def test_cart_agrees(shape: tuple[int, int], tasks: int, rank: float) -> None:
    check("cart", experts(tasks, *shape), reference_cart, rank=rank)


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_cart_agrees_for_scales_and_defaults(scale: float) -> None:
    check("cart", experts(4, 30, 25), reference_cart, scale=scale)
    check("cart", experts(4, 30, 25), reference_cart)


def test_cart_floors_the_share_as_written() -> None:
    task_vectors = gaussian(3, 100, 100)
    assert run("cart", task_vectors, rank=0.29).facts["residual_rank"] == 29  # 0.29 * 100 is 28.999999999999996
    assert run("cart", task_vectors, rank=1e-9).facts["residual_rank"] == 1


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"rank": 0.0}, {"rank": 1.0}, {"rank": 1.0, "scale": 50.0}])
def test_cart_is_averaging_without_or_with_whole_residuals(options: dict[str, float]) -> None:
    task_vectors = experts(4, 9, 12)
    assert error(merge("cart", task_vectors, **options), task_vectors.mean(0)) <= 1e-12


@given(rank=st.floats(0, 1), scale=st.floats(0, 10))
def test_cart_of_two_experts_is_averaging(rank: float, scale: float) -> None:
    task_vectors = experts(2, 9, 12)
    assert error(merge("cart", task_vectors, rank=rank, scale=scale), task_vectors.mean(0)) <= 1e-9


@pytest.mark.parametrize("copies", [1, 3])
def test_cart_of_one_expert_or_its_copies_is_that_expert(copies: int) -> None:
    task_vectors = experts(1, 9, 12).repeat(copies, 1, 1)
    assert error(merge("cart", task_vectors), task_vectors[0]) <= 1e-12


def test_cart_adds_a_residual_of_bounded_rank() -> None:
    task_vectors = experts(3, 40, 50)
    residual = merge("cart", task_vectors, rank=0.1) - task_vectors.mean(0)
    assert torch.linalg.matrix_rank(residual, rtol=1e-9) == 3 * 4


def test_cart_counts_an_expert_that_changed_nothing() -> None:
    task_vectors = experts(3, 9, 12)
    task_vectors[1] = 0
    check("cart", task_vectors, reference_cart)
