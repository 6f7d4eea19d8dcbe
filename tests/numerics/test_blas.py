"""Against torch, on matrices laid out in every way that callers have."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acemerge.numerics import blas

SIZES = st.integers(1, 12)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "rows") -> Tensor:
    if layout == "columns":
        return torch.randn(columns, rows, dtype=dtype).T
    if layout == "apart":  # rows of a wider matrix
        return torch.randn(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1]
    if layout == "scattered":
        return torch.randn(rows, 2 * columns, dtype=dtype)[:, ::2]
    return torch.randn(rows, columns, dtype=dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    rtol, atol = (1e-3, 1e-4) if found.dtype == torch.float32 else (1e-10, 1e-10)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


@given(SIZES, SIZES, DTYPES, st.sampled_from(["rows", "columns", "apart", "scattered"]))
def test_symmetric_update(rows: int, n: int, dtype: torch.dtype, layout: str) -> None:
    x, whole = matrix(rows, n, dtype, layout), matrix(n, n + 4, dtype)
    before, given_x = whole.clone(), x.clone()
    blas.syrk(whole[:, 2 : n + 2], x, 0.5)
    wanted = before.clone()
    wanted[:, 2 : n + 2] += (0.5 * x.T @ x).tril()
    close(whole, wanted)  # nothing else of the matrix around it changes
    assert x.equal(given_x)


@given(SIZES, SIZES, DTYPES, st.sampled_from(["rows", "columns", "apart", "scattered"]))
def test_symmetric_product(m: int, n: int, dtype: torch.dtype, layout: str) -> None:
    a, lower, c = matrix(m, n, dtype, layout), matrix(n, n, dtype), matrix(m, n, dtype, "apart")
    wanted = c + 2 * a @ (lower.tril() + lower.tril(-1).T)
    blas.symm(c, a, lower, 2.0)
    close(c, wanted)


@given(SIZES, SIZES, DTYPES)
def test_cholesky(m: int, n: int, dtype: torch.dtype) -> None:
    x, rows = matrix(2 * n, n, dtype), matrix(m, n, dtype)
    system = x.T @ x + torch.eye(n, dtype=dtype)
    factor, solved = system.clone(), rows.clone()
    assert blas.potrf(factor)
    close(factor.tril(), torch.linalg.cholesky(system))
    blas.potrs(factor, solved)
    close(solved @ system, rows)


def test_cholesky_says_when_a_matrix_is_not_positive_definite() -> None:
    assert not blas.potrf(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))


@given(SIZES, st.data(), DTYPES)
def test_leading_eigenpairs(n: int, data: st.DataObject, dtype: torch.dtype) -> None:
    k = data.draw(st.integers(1, n))
    x = matrix(n, n, dtype)
    symmetric = x + x.T
    values, vectors = blas.leading_eigenpairs(symmetric.tril(), k)
    close(values, torch.linalg.eigvalsh(symmetric)[n - k :])
    close(vectors @ symmetric, values[:, None] * vectors)
    close(vectors @ vectors.T, torch.eye(k, dtype=dtype))


def test_an_output_whose_rows_are_scattered_is_refused() -> None:
    with pytest.raises(ValueError, match="next to each other"):
        blas.symm(torch.zeros(4, 4)[:, ::2], torch.zeros(4, 2), torch.zeros(2, 2), 1.0)


def test_other_threads_go_on_meanwhile() -> None:
    """Python's lock is free while LAPACK works: a thread that only counts gets its turns."""
    symmetric = torch.eye(600, dtype=torch.float64).add_(torch.ones(600, 600, dtype=torch.float64))
    done = threading.Event()

    def work() -> None:
        blas.leading_eigenpairs(symmetric, 600)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3
