"""BLAS and LAPACK on torch's CPU memory, without a copy and without Python's lock.

Torch has no symmetric products and no partial eigendecompositions; scipy's functions for them hold Python's lock, so that threads
wait for each other. Here are the same functions of scipy's library, through the pointers that it gives to Cython.

Torch's matrices are row-major and Fortran's are column-major: Fortran sees the transpose, whose upper triangle is our lower one.
All functions here speak of our matrices. Rows may lie apart in memory (views of columns are fine), entries of a row may not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.threads import look_for_blas_again

_LETTERS = {torch.float32: "s", torch.float64: "d"}
_SCALARS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def syrk(c: Float[Tensor, "n n"], x: Float[Tensor, "rows n"], scale: float) -> None:
    """Lower triangle of c += scale x^T x; x may be the transpose of a row-major matrix."""
    transposed = x.stride(0) == 1 != x.stride(1)
    a = x.T if transposed else _row_major(x)
    sizes = (x.shape[1], x.shape[0])
    _call("syrk", c.dtype, b"U", b"T" if transposed else b"N", *sizes, scale, a, _stride(a), 1.0, c, _stride(c))


def symm(c: Float[Tensor, "m n"], a: Float[Tensor, "m n"], symmetric: Float[Tensor, "n n"], scale: float) -> None:
    """c += scale a symmetric, of which the lower triangle is given."""
    m, n = c.shape
    a = _row_major(a)
    operands = (symmetric, _stride(symmetric), a, _stride(a), 1.0, c, _stride(c))
    _call("symm", c.dtype, b"L", b"U", n, m, scale, *operands)


def potrf(a: Float[Tensor, "n n"]) -> bool:
    """Cholesky's L in the place of the lower triangle of a; whether a is positive definite."""
    _call("potrf", a.dtype, b"U", len(a), a, _stride(a), failed := ctypes.c_int())
    return failed.value == 0


def potrs(factor: Float[Tensor, "n n"], rows: Float[Tensor, "m n"]) -> None:
    """rows (L L^T)^-1 in the place of the rows."""
    m, n = rows.shape
    _call("potrs", rows.dtype, b"U", n, m, factor, _stride(factor), rows, _stride(rows), ctypes.c_int())


def leading_eigenpairs(a: Float[Tensor, "n n"], k: int) -> tuple[Float[Tensor, " k"], Float[Tensor, "k n"]]:
    """The k > 0 largest eigenvalues, ascending, and their vectors as rows, of a symmetric a's lower triangle, which is used up.

    Tridiagonal form, all its eigenpairs by divide and conquer, and only k of them on the way back.
    """
    n = len(a)
    values, off_diagonal, reflectors = a.new_empty(n), a.new_zeros(max(1, n - 1)), a.new_empty(max(1, n - 1))
    vectors = a.new_empty(n, n)
    real = (a.dtype,)
    _work("sytrd", a.dtype, b"U", n, a, _stride(a), values, off_diagonal, reflectors, kinds=real)
    _work("stedc", a.dtype, b"I", n, values, off_diagonal, vectors, n, kinds=(a.dtype, torch.int32))
    vectors = vectors[n - k :]
    _work("ormtr", a.dtype, b"L", b"U", b"N", n, k, a, _stride(a), reflectors, vectors, n, kinds=real)
    return values[n - k :], vectors


def _row_major(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _stride(matrix: Tensor) -> int:
    """How far its rows are apart: what Fortran calls the leading dimension."""
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(f"the entries of a row must be next to each other, not {matrix.stride(1)} apart")
    return max(matrix.stride(0), matrix.shape[1], 1)


def _work(name: str, dtype: torch.dtype, *arguments: Any, kinds: tuple[torch.dtype, ...]) -> None:
    """Call a function with workspaces of these kinds, which it has to be asked for the sizes of."""
    wanted = [torch.empty(1, dtype=kind) for kind in kinds]
    _call(name, dtype, *arguments, *(part for size in wanted for part in (size, -1)), failed := ctypes.c_int())
    spaces = [torch.empty(int(size), dtype=size.dtype) for size in wanted]
    _call(name, dtype, *arguments, *(part for space in spaces for part in (space, len(space))), failed)
    if failed.value:
        raise ArithmeticError(f"LAPACK's {name} failed ({failed.value}): are all values finite?")


def _call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Fortran takes the address of every argument."""
    _function(_LETTERS[dtype] + name)(*(_address(argument, _SCALARS[dtype]) for argument in arguments))


def _address(argument: Any, scalar: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, ctypes.c_int):
        return ctypes.byref(argument)
    return ctypes.byref(scalar(argument) if isinstance(argument, float) else ctypes.c_int(argument))


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]


@cache
def _function(name: str) -> Callable[..., None]:
    capsules = load()
    signature = _get_name(capsules[name])
    arguments = [ctypes.c_void_p] * (signature.count(b",") + 1)
    return ctypes.CFUNCTYPE(None, *arguments)(_get_pointer(capsules[name], signature))


@cache
def load() -> dict[str, Any]:
    """The library's functions. Before that no limit of threads reaches it."""
    from scipy.linalg import cython_blas, cython_lapack  # takes a tenth of a second: not for methods that need no BLAS

    look_for_blas_again()
    return {**cython_blas.__pyx_capi__, **cython_lapack.__pyx_capi__}
