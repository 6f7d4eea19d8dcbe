"""The products, factorisations and decompositions that methods are made of, by LAPACK and by torch."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from acemerge import merge_task_vectors
from acemerge.numerics import linalg
from acemerge.numerics.linalg import weighted_sum
from spectral_cases import error, gaussian

ROUTES = ["lapack", "torch"]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both routes on CPU tensors: what a GPU would run is the torch one."""
    monkeypatch.setattr(linalg, "uses_lapack", lambda tensor: request.param == "lapack")
    return str(request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("transposed", [False, True])
def test_gram_accumulates_in_place_from_either_layout(route: str, transposed: bool) -> None:
    x = random(7, 5) if not transposed else random(5, 7).T
    gram = torch.zeros(5, 5, dtype=torch.float64)
    linalg.add_gram(gram, x)
    linalg.add_gram(gram, x, scale=2.0)
    torch.testing.assert_close(linalg.mirror_lower(gram), 3 * x.T @ x)


def test_mirror_lower_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "_BLOCK_ELEMENTS", 20)
    full = random(9, 9)
    full = full + full.T
    torch.testing.assert_close(linalg.mirror_lower(full.tril()), full, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [3, 12])
def test_primal_and_dual_gram_agree_with_the_definition(route: str, rows: int) -> None:
    stack, a, ridge = random(rows, 8), random(4, 8, seed=1), 0.3
    S = stack.T @ stack
    primal, dual = linalg.PrimalGram(S.clone()), linalg.DualGram(stack, stack @ stack.T)
    inverse = torch.linalg.inv(S + ridge * torch.eye(8, dtype=torch.float64))
    for gram in (primal, dual):
        torch.testing.assert_close(gram.times(a), a @ S)
        torch.testing.assert_close(gram.times(torch.ones(1, S.shape[1], dtype=S.dtype))[0], S.sum(1))
        torch.testing.assert_close(gram.factorise(ridge)(a.clone()), a @ inverse)


def test_a_system_that_is_not_positive_definite_is_an_error(route: str) -> None:
    with pytest.raises(ArithmeticError, match="not positive definite"):
        linalg.PrimalGram(-torch.eye(3, dtype=torch.float64)).factorise(1e-9)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (7, 7)])
def test_leading_directions_are_those_of_the_svd(route: str, shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    leading = linalg.leading_directions(matrix, 3)
    torch.testing.assert_close(leading.values.flip(0), s[:3])
    torch.testing.assert_close(leading.left @ leading.right.T, u[:, :3] @ vh[:3])


def test_leading_directions_stop_at_the_rank(route: str) -> None:
    matrix = random(20, 2) @ random(2, 12, seed=1)
    leading = linalg.leading_directions(matrix, 6)
    assert leading.values.shape == (2,)
    torch.testing.assert_close(leading.left.T @ leading.left, torch.eye(2, dtype=torch.float64))


def test_no_leading_directions(route: str) -> None:
    assert linalg.leading_directions(random(4, 5), 0).right.shape == (5, 0)


@pytest.mark.parametrize("shape", [(6, 6), (4, 40), (40, 4), (8, 12)])
@pytest.mark.parametrize("tau", [0.0, 1e9], ids=["heterogeneous", "homogeneous"])
def test_ace_is_the_same_on_both_routes(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], tau: float) -> None:
    task_vectors = random(3, *shape) * torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)[:, None, None]
    on_lapack = merge_task_vectors(task_vectors, "ace", epsilon=1e-3, tau=tau)
    monkeypatch.setattr(linalg, "uses_lapack", lambda tensor: False)
    torch.testing.assert_close(merge_task_vectors(task_vectors, "ace", epsilon=1e-3, tau=tau), on_lapack)


def test_blocks_do_not_change_ace(monkeypatch: pytest.MonkeyPatch) -> None:
    task_vectors = random(3, 11, 7) * torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)[:, None, None]
    whole = merge_task_vectors(task_vectors, "ace", epsilon=1e-3, tau=0.0)
    monkeypatch.setattr(linalg, "_BLOCK_ELEMENTS", 15)
    torch.testing.assert_close(merge_task_vectors(task_vectors, "ace", epsilon=1e-3, tau=0.0), whole)


def test_small_singular_directions_are_as_accurate_as_large_ones(route: str) -> None:
    spectrum = torch.logspace(0, -5.5, 12, dtype=torch.float64)
    u, v = (torch.linalg.qr(random(rows, 12, seed=rows))[0] for rows in (30, 20))
    leading = linalg.leading_directions(u * spectrum @ v.T, 12)
    torch.testing.assert_close(leading.values.flip(0), spectrum, rtol=1e-9, atol=0)
    torch.testing.assert_close(leading.left @ leading.right.T, u @ v.T, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("rtol", [1e-12, 1e-2, 0.5])
def test_pseudo_inverse_leaves_out_small_eigenvalues(rtol: float) -> None:
    x, a = gaussian(6, 9), gaussian(4, 9, seed=1)
    gram = x.T @ x
    expected = a.numpy() @ np.linalg.pinv(gram.numpy(), rcond=rtol, hermitian=True)
    divide, kept = linalg.pseudo_inverse(gram, rtol)
    assert error(divide(a), expected) <= 1e-9
    assert kept == int((torch.linalg.svdvals(x) ** 2 > rtol * torch.linalg.svdvals(x)[0] ** 2).sum())


def test_pseudo_inverse_of_zero_is_zero() -> None:
    divide, kept = linalg.pseudo_inverse(torch.zeros(3, 3, dtype=torch.float64), 1e-6)
    assert kept == 0
    assert not divide(gaussian(2, 3)).any()


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_polar_counts_directions_below_the_cut_as_missing(shape: tuple[int, int]) -> None:
    r = min(shape)
    u, v = torch.linalg.qr(gaussian(shape[0], r)).Q, torch.linalg.qr(gaussian(shape[1], r, seed=1)).Q
    values = torch.ones(r, dtype=torch.float64)
    values[-1] = 1e-6
    matrix = (u * values) @ v.T
    exact, cut = linalg.polar(matrix), linalg.polar(matrix, 1e-5)
    assert (exact.deficient, cut.deficient) == (False, True)
    torch.testing.assert_close(exact.factor, u @ v.T)
    torch.testing.assert_close(cut.factor, u[:, :-1] @ v[:, :-1].T)


def test_fixed_signs_do_not_depend_on_those_of_the_factorisation() -> None:
    vectors = gaussian(7, 5)
    fixed = vectors * linalg.fixed_signs(vectors)
    assert all(column[column.abs().argmax()] > 0 for column in fixed.T)
    flipped = vectors * torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    assert fixed.equal(flipped * linalg.fixed_signs(flipped))
    assert linalg.fixed_signs(vectors[:, :0]).shape == (0,)


def test_changed_tasks() -> None:
    task_vectors = torch.zeros(3, 2, 2)
    task_vectors[1, 0, 0] = 1e-30
    assert linalg.changed_tasks(task_vectors) == [1]


def test_weighted_sum_is_exact_in_any_order() -> None:
    x = torch.tensor([[0.1], [0.2], [-0.3], [1e-9]])  # float32: their sum depends on the order
    sums = {float(weighted_sum(x[list(order)], [1.0] * 4)) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])}
    assert sums == {math.fsum(x.double().reshape(-1).tolist())}
