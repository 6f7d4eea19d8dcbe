"""Where the speed lives: Gram matrices, ridge solves and leading singular directions, behind names from the maths.

Float64 unless a method asks for less. The merge equations divide by small eigenvalues of Gram matrices, which square the
condition number: float32 keeps two to five correct digits there, as the spectra of the task vectors decay, float64 keeps ten.
CPU tensors go to `numerics.blas` for what torch lacks (SYRK, SYMM, a partial eigendecomposition), other devices to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics import blas
from acemerge.numerics.threads import share

_BLOCK_ELEMENTS = 2**20  # float64 elements converted at a time: 8 MiB
IN_CACHE = 2**16  # of which a processor's cache keeps what was converted until it is used


def row_blocks(rows: int, columns: int, elements: int = _BLOCK_ELEMENTS) -> Iterator[slice]:
    """Slices of rows small enough to convert to float64 without doubling a large tensor.

    >>> list(row_blocks(3, 2**19))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def shared_rows(matrix: Float[Tensor, "m n"]) -> list[slice]:
    """Blocks of rows for threads to share: of equal size, several to a matrix; one on other devices, which share work themselves.

    >>> shared_rows(torch.zeros(768, 1))
    [slice(0, 192, None), slice(192, 384, None), slice(384, 576, None), slice(576, 768, None)]
    """
    rows = len(matrix)
    count = min(math.ceil(rows / 64), 4 * math.ceil(rows / 1024)) if uses_lapack(matrix) else 1
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def uses_lapack(tensor: Tensor) -> bool:
    """Whether scipy's BLAS and LAPACK can work on this tensor's memory; otherwise torch does the same on its device."""
    return tensor.device.type == "cpu"


def sum_of_squares(x: Float[Tensor, "*shape"]) -> float:
    """|x|_F^2, accumulated in float64."""
    flat = x.reshape(-1)
    norms = (torch.linalg.vector_norm(flat[block], dtype=torch.float64) for block in row_blocks(flat.numel(), 1, IN_CACHE))
    return math.fsum(float(norm) ** 2 for norm in norms)


def weighted_sum(vectors: Float[Tensor, "task *shape"], weights: Sequence[float]) -> Float[Tensor, "*shape"]:
    """sum_t w_t x_t in float64, where float32 entries that cancel do so exactly, whatever their order."""
    flat = vectors.reshape(len(vectors), -1)
    total = torch.empty(flat.shape[1], dtype=torch.float64, device=vectors.device)
    w = torch.tensor(weights, dtype=torch.float64, device=vectors.device)
    for block in row_blocks(len(total), len(flat), 4 * IN_CACHE):
        torch.mv(flat[:, block].double().T, w, out=total[block])  # twice as fast as adding one after the other
    return total.reshape(vectors.shape[1:])


def changed_tasks(task_vectors: Float[Tensor, "task *shape"]) -> list[int]:
    """Which experts changed this tensor at all."""
    return [t for t, task_vector in enumerate(task_vectors) if bool(task_vector.any())]


_PANEL = 384


def add_gram(gram: Float[Tensor, "n n"], x: Float[Tensor, "rows n"], scale: float = 1.0) -> None:
    """Lower triangle of `gram` += scale x^T x, in place: half the work of a product."""
    n = gram.shape[0]

    def add_panel(start: int) -> None:
        end = min(start + _PANEL, n)
        gram[start:end, :start].addmm_(x[:, start:end].T, x[:, :start], alpha=scale)
        _add_small_gram(gram[start:end, start:end], x[:, start:end], scale)

    if n <= 2 * _PANEL:
        _add_small_gram(gram, x, scale)
    else:
        share(add_panel, reversed(range(0, n, _PANEL)))  # the longest first


def _add_small_gram(gram: Float[Tensor, "n n"], x: Float[Tensor, "rows n"], scale: float) -> None:
    if uses_lapack(gram):
        blas.syrk(gram, x, scale)
    else:
        gram.addmm_(x.T, x, alpha=scale)


def add_symmetric_product(
    total: Float[Tensor, "m n"], a: Float[Tensor, "m n"], gram: Float[Tensor, "n n"], scale: float = 1.0
) -> None:
    """`total += scale a gram` in place, for a symmetric matrix given by its lower triangle."""
    if uses_lapack(total):
        blas.symm(total, a, gram, scale)
    else:
        total.addmm_(a, mirror_lower(gram.clone()), alpha=scale)


def add_product(total: Float[Tensor, "m n"], a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], scale: float = 1.0) -> None:
    """`total += scale a b` in place."""
    share(lambda rows: total[rows].addmm_(a[rows], b, alpha=scale), shared_rows(total))


def mirror_lower(gram: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Fill the upper triangle from the lower one, in place and block by block, and return the matrix."""
    n = gram.shape[0]
    for block in row_blocks(n, n):
        gram[: block.start, block] = gram[block, : block.start].T
        corner = gram[block, block]
        corner.copy_(corner.tril() + corner.tril(-1).T)
    return gram


RidgeSolver = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PrimalGram:
    """S = X^T X for a stack of rows X, as the lower triangle of an n x n matrix. Right when X has at least n rows."""

    matrix: Float[Tensor, "n n"]

    def copy(self) -> PrimalGram:
        """The same S once more, for a factorisation to use up."""
        return PrimalGram(self.matrix.clone())

    def times(self, a: Float[Tensor, "some n"]) -> Float[Tensor, "some n"]:
        """`a S`."""
        product = a.new_zeros(a.shape)
        add_symmetric_product(product, a, self.matrix)
        return product

    def norm(self) -> float:
        """|S|_F."""
        return _symmetric_norm(self.matrix)

    def factorise(self, ridge: float) -> RidgeSolver:
        """`a -> a (S + ridge I)^-1`, by Cholesky in place: S is used up, and `a` is overwritten.

        Positive definite for ridge > 0, so no inverse and no fallback.
        """
        return cholesky_solver(self.matrix, ridge)


@dataclass(frozen=True)
class DualGram:
    """The same S through K = X X^T, for a stack X of fewer than n rows (Woodbury): no n x n matrix is ever formed."""

    stack: Float[Tensor, "rows n"]
    outer: Float[Tensor, "rows rows"]

    def copy(self) -> DualGram:
        """The same S once more, for a factorisation to use up."""
        return DualGram(self.stack, self.outer.clone())

    def times(self, a: Float[Tensor, "some n"]) -> Float[Tensor, "some n"]:
        """`a S`."""
        return (a @ self.stack.T) @ self.stack

    def norm(self) -> float:
        """|S|_F = |K|_F."""
        return _symmetric_norm(self.outer)

    def factorise(self, ridge: float) -> RidgeSolver:
        """`a -> a (S + ridge I)^-1 = (a - a X^T (K + ridge I)^-1 X) / ridge`; K is used up."""
        solve = cholesky_solver(self.outer, ridge)
        return lambda a: (a - solve(a @ self.stack.T) @ self.stack) / ridge


Gram = PrimalGram | DualGram


def _symmetric_norm(lower: Float[Tensor, "n n"]) -> float:
    below = sum_of_squares(lower.tril(-1))
    return math.sqrt(2 * below + sum_of_squares(lower.diagonal()))


_PROBES = 8


def rounding_error(gram_norm: float, divide: RidgeSolver, like: Float[Tensor, "m n"]) -> float:
    """How far rounding of S moves `a Q^-1`, Q = S + ridge I, relative to its length: what is typical, within a factor of 3.

    To first order that is -(a Q^-1) dS Q^-1. With rounding errors of about u |S|_F / n in each entry of S its length is
    |a Q^-1| u |S|_F |Q^-1|_F / sqrt(n); |Q^-1|_F^2 is the mean of |z Q^-1|^2 over random signs z (Hutchinson).
    """
    n = like.shape[1]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_PROBES, n), generator=generator).mul_(2).sub_(1).to(like)
    inverse_norm = math.sqrt(sum_of_squares(divide(signs)) / _PROBES)
    return torch.finfo(like.dtype).eps / 2 * gram_norm * inverse_norm / math.sqrt(n)


def cholesky_solver(gram: Float[Tensor, "n n"], ridge: float) -> RidgeSolver:
    """`a -> a (gram + ridge I)^-1`. Both `gram` and the rows given to the solver are overwritten."""
    gram.diagonal().add_(ridge)
    if uses_lapack(gram):
        lower, positive = gram, blas.potrf(gram)
    else:
        lower, info = torch.linalg.cholesky_ex(gram)
        positive = not info
    if not positive:
        precision = str(gram.dtype).removeprefix("torch.")
        raise ArithmeticError(f"the regularised system is not positive definite in {precision} (ridge {ridge:.3g})")

    def divide(a: Tensor) -> Tensor:
        share(lambda rows: _divide_rows(a[rows], lower), shared_rows(a))
        return a

    return divide


def _divide_rows(a: Float[Tensor, "m n"], lower: Float[Tensor, "n n"]) -> None:
    """a (L L^T)^-1 in place."""
    if uses_lapack(a) and a.dtype == torch.float64:
        blas.potrs(lower, a)
        return
    # In float32, OpenBLAS' triangular solves lose half a digit more than torch's.
    half = torch.linalg.solve_triangular(lower.T, a, upper=True, left=False)
    torch.linalg.solve_triangular(lower, half, upper=False, left=False, out=a)


def pseudo_inverse(gram: Float[Tensor, "n n"], rtol: float) -> tuple[RidgeSolver, int]:
    """`a -> a gram^+` without the eigenvalues up to rtol of the largest, and how many are left; `gram` is overwritten."""
    values, vectors = _leading_eigenpairs(gram, gram.shape[0])
    kept = values > rtol * values[-1]
    values, vectors = values[kept], vectors[:, kept]
    return lambda a: (a @ vectors).div_(values) @ vectors.T, len(values)


Gains = Callable[[Tensor], Tensor]
"""Eigenvalues, none negative and the largest last -> what each of their directions is multiplied by."""


def spectral_function(gram: Float[Tensor, "n n"], gains: Gains) -> tuple[RidgeSolver, int]:
    """`a -> a g(gram)` for a function g of the eigenvalues, and how many it does not make zero; `gram` is overwritten."""
    values, vectors = _leading_eigenpairs(gram, gram.shape[0])
    g = gains(values.clamp(min=0))
    used = g != 0
    g, vectors = g[used], vectors[:, used]
    return lambda a: (a @ vectors).mul_(g) @ vectors.T, len(g)


@dataclass(frozen=True)
class LeadingDirections:
    """The k leading singular triples of a matrix, U_k, s_1..s_k and V_k, smallest value first."""

    values: Float[Tensor, " k"]
    left: Float[Tensor, "m k"]
    right: Float[Tensor, "n k"]


def leading_directions(matrix: Float[Tensor, "m n"], k: int) -> LeadingDirections:
    """The k leading singular triples by a partial eigendecomposition of the smaller Gram matrix.

    Rank-aware: directions whose singular value is below sqrt(max(m, n) eps64) of the first are noise, not directions, and are
    left out, so fewer than k may come back.
    """
    m, n = matrix.shape
    k = min(k, m, n)
    if m < n:
        flipped = leading_directions(matrix.T, k)
        return LeadingDirections(flipped.values, flipped.right, flipped.left)
    floor = (max(m, n) + 100) * torch.finfo(torch.float64).eps  # the 100: rounding in the smallest matrices
    right = _leading_right_vectors(matrix, k, floor)
    left = matrix.new_zeros(m, right.shape[1])
    add_product(left, matrix, right)
    values = torch.linalg.vector_norm(left, dim=0)
    return LeadingDirections(values, left.div_(values), right)


def leading_count(values: Float[Tensor, " k"], share: float) -> int:
    """How many of the values, smallest first, it takes at least to have this share of their sum: the largest, 1 or more.

    >>> leading_count(torch.tensor([1.0, 2.0, 3.0]), 0.6)
    2
    """
    reached = values.flip(0).cumsum(0) >= share * values.sum() * (1 - 1e-12)  # rounding must not ask for more than there is
    return int(reached.int().argmax()) + 1


# A Gram matrix gives singular directions to about eps64 (s_1 / s_i)^2: past this ratio of squares the rest is done again without
# the part already known.
_ACCURATE_SQUARES = 1e-6


def _leading_right_vectors(
    matrix: Float[Tensor, "m n"], k: int, floor: float, top: float | None = None
) -> Float[Tensor, "n found"]:
    """V_k, smallest singular value first; only directions with s_i^2 > floor * s_1^2 (`top`) of the whole matrix."""
    n = matrix.shape[1]
    if k == 0:
        return matrix.new_zeros(n, 0)
    gram = torch.zeros(n, n, dtype=torch.float64, device=matrix.device)
    add_gram(gram, matrix)
    squares, vectors = _leading_eigenpairs(gram, k)
    largest = float(squares[-1])
    top = largest if top is None else top
    accurate = (squares > _ACCURATE_SQUARES * largest) & (squares > floor * top)
    head = vectors[:, accurate]
    left_over = k - head.shape[1]
    if left_over == 0 or head.shape[1] == 0 or _ACCURATE_SQUARES * largest <= floor * top:
        return head
    rest = matrix.clone()
    for rows in row_blocks(len(matrix), n):
        rest[rows].addmm_(matrix[rows] @ head, head.T, alpha=-1)
    tail = _leading_right_vectors(rest, left_over, floor, top)
    tail = tail - head @ (head.T @ tail)  # what rounding left of the head would be magnified by s_1 / s_i in the left vectors
    return torch.cat([tail, head], dim=1)


def _leading_eigenpairs(gram: Float[Tensor, "n n"], k: int) -> tuple[Float[Tensor, " k"], Float[Tensor, "n k"]]:
    """The k > 0 largest eigenpairs, in ascending order, of a symmetric matrix given by its lower triangle (overwritten)."""
    if uses_lapack(gram):
        values, vectors = blas.leading_eigenpairs(gram, k)
        return values, vectors.T
    n = gram.shape[0]
    all_values, all_vectors = torch.linalg.eigh(gram, UPLO="L")
    return all_values[n - k :], all_vectors[:, n - k :]


@dataclass(frozen=True)
class Polar:
    """polar(X) = U V^T of a thin SVD X = U diag(s) V^T: the nearest matrix with orthonormal rows or columns.

    Unique only when X has full rank; otherwise `deficient` says so, and `factor` spans the range of X alone: directions that
    X does not have get no arbitrary ones.
    """

    factor: Float[Tensor, "m n"]
    values: Float[Tensor, " r"]
    deficient: bool


def polar(matrix: Float[Tensor, "m n"], cut: float = 0.0) -> Polar:
    """The polar factor and the singular values (smallest first), in float64, by the smaller Gram matrix where that is accurate.

    The Gram matrix squares the condition number; past 1e-10 of it, an SVD takes over. A direction whose singular value is below
    `cut` <= 1e-5 of the largest counts as one that X does not have; by default that is for rounding to decide.
    """
    m, n = matrix.shape
    if m < n:
        flipped = polar(matrix.T, cut)
        return Polar(flipped.factor.T, flipped.values, flipped.deficient)
    matrix = matrix.double()
    gram = torch.zeros(n, n, dtype=torch.float64, device=matrix.device)
    add_gram(gram, matrix)
    squares, vectors = _leading_eigenpairs(gram, n)
    if squares[0] > 1e-10 * squares[-1]:
        values = squares.sqrt()
        return Polar((matrix @ (vectors / values)) @ vectors.T, values, deficient=False)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    clear = values > max(cut, max(m, n) * torch.finfo(torch.float64).eps) * values[0]
    return Polar(left[:, clear] @ right[clear], values.flip(0), deficient=not bool(clear.all()))


def fixed_signs(vectors: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """+1 or -1 for each column, such that times it the column's largest entry is positive: a factorisation leaves signs open."""
    if not vectors.numel():
        return vectors.new_ones(vectors.shape[1])
    return vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0].sign()


def directions_flops(m: int, n: int, k: int) -> float:
    """GEMM-equivalent operations of k leading singular triples: the smaller Gram matrix, its eigenvectors, the other side's."""
    small = min(m, n)
    return m * n * small + 4.0 * small**3 + 2.0 * m * n * k


def directions_elements(m: int, n: int, k: int) -> float:
    """float64 numbers held while finding them, beside the matrix: the Gram matrix, its eigenvectors twice, and both sides'."""
    return 3.0 * min(m, n) ** 2 + (m + n) * k
