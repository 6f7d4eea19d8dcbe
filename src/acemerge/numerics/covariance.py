"""Each expert's input covariance, read off its weight change: what ACE, ACTMat and WUDI merge under.

    tau_t = W_t - W0 (m x n)      C_t = tau_t, with its column means removed if centred      S_t = C_t^T C_t (n x n)

All three need S = sum_t a_t S_t and sum_t a_t C_t S_t. Here is how these are formed: on the smaller side of each product, a block
of rows at a time, without T Gram matrices and without a converted copy of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import (
    IN_CACHE,
    DualGram,
    Gains,
    Gram,
    PrimalGram,
    add_gram,
    add_product,
    add_symmetric_product,
    mirror_lower,
    pseudo_inverse,
    row_blocks,
    shared_rows,
    spectral_function,
    sum_of_squares,
)
from acemerge.numerics.threads import AT_ONCE, available_threads, share

Weighted = Sequence[tuple[int, float]]
"""Experts and their a_t."""

_ROUNDING = 2.0**-44  # of what centring subtracts: what is left of a matrix whose rows are all equal


class Experts:
    """The experts' C_t: tau_t - 1 mu_t^T with the column means mu_t if `centre`, else tau_t itself (mu_t = 0).

    Everything here is the same in any frame, with the frame's image of the vector of ones in the place of 1.
    """

    def __init__(
        self,
        task_vectors: Float[Tensor, "task out in"],
        chosen: Sequence[int],
        frame: Frame,
        *,
        centre: bool,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.dtype = dtype
        self._deltas = [task_vectors[t] for t in chosen]
        self._rows, self._columns = task_vectors.shape[1:]
        self._ones, self._ones_squared = frame.ones_out.to(dtype), frame.shape[0]
        self._device = task_vectors.device
        self._means = share(self._column_means if centre else lambda _: self._double(self._columns), self._deltas)

    def _column_means(self, D: Float[Tensor, "out in"]) -> Float[Tensor, " in"]:
        total = self._double(self._columns)
        for rows in row_blocks(self._rows, self._columns, IN_CACHE):
            total.addmv_(D[rows].double().T, self._ones[rows].double())
        return total / self._ones_squared

    def _double(self, *shape: int) -> Float[Tensor, "*shape"]:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def _zeros(self, *shape: int) -> Float[Tensor, "*shape"]:
        return torch.zeros(shape, dtype=self.dtype, device=self._device)

    def _centred(self, t: int, rows: slice) -> Float[Tensor, "rows in"]:
        means = self._means[t].to(self.dtype)
        return torch.addr(self._deltas[t][rows].to(self.dtype), self._ones[rows], means, alpha=-1)

    def traces(self, energies: Sequence[float]) -> list[float]:
        """tr_t = |C_t|_F^2, given |tau_t|_F^2; exactly 0 where only the column means changed, up to rounding of those means."""
        return [self._trace(t, energy) for t, energy in enumerate(energies)]

    def _trace(self, t: int, energy: float) -> float:
        removed = self._ones_squared * sum_of_squares(self._means[t])  # |1 mu_t^T|^2
        trace = energy - removed
        if trace < removed:  # the difference is not accurate
            trace = math.fsum(sum_of_squares(self._centred(t, rows)) for rows in row_blocks(self._rows, self._columns))
        return trace if trace > _ROUNDING**2 * removed else 0.0

    def sum(self, rows: slice) -> Float[Tensor, "rows in"]:
        """sum_t tau_t, a block of its rows."""
        total = self._deltas[0][rows].to(self.dtype, copy=True)
        for D in self._deltas[1:]:
            total += D[rows]
        return total

    def add_weighted(self, total: Float[Tensor, "out in"], weights: Sequence[float]) -> Float[Tensor, "out in"]:
        """total + sum_t weight_t C_t, in place."""

        def add_to(rows: slice) -> None:
            for t, weight in enumerate(weights):
                total[rows].add_(self._centred(t, rows), alpha=weight)

        share(add_to, shared_rows(total))
        return total

    def mean_covariance(self, a: Sequence[float]) -> Float[Tensor, " in"]:
        """sum_t a_t mu_t^T S_t, a row: what centring removed from sum_t a_t tau_t S_t."""

        def own(t: int) -> Tensor:
            total = self._zeros(self._columns)
            for rows in row_blocks(self._rows, self._columns):
                C = self._centred(t, rows)
                total.addmv_(C.T, C @ self._means[t].to(self.dtype), alpha=a[t])
            return total

        return torch.stack(share(own, range(len(a)))).sum(0)

    def weighted_covariance(self, a: Sequence[float]) -> tuple[Gram, Float[Tensor, "out in"]]:
        """S = sum_t a_t S_t and sum_t a_t C_t S_t, each product formed on its smaller side."""
        if self._is_very_wide(a):
            stack, outer = self._stack(a)
            return DualGram(stack, outer), self._own_blocks(outer, a) @ stack
        S, CS = self._primal_covariance(a)
        return PrimalGram(S), CS

    def weighted_covariances(self, weightings: Sequence[Sequence[float]]) -> list[tuple[Gram, Float[Tensor, "out in"]]]:
        """The same for several weights a: S_t and C_t S_t are formed once, and added to every sum."""
        if len(weightings) == 1 or self._is_very_wide(weightings[0]):
            return [self.weighted_covariance(a) for a in weightings]
        sums = [(self._zeros(self._columns, self._columns), self._zeros(self._rows, self._columns)) for _ in weightings]
        for t in range(len(self._deltas)):
            S_t, CS_t = self._primal_covariance([1.0], [t])
            for a, (S, CS) in zip(weightings, sums, strict=True):
                S.add_(S_t, alpha=a[t])
                CS.add_(CS_t, alpha=a[t])
        return [(PrimalGram(S), CS) for S, CS in sums]

    def least_squares(self, a: Sequence[float], rtol: float) -> tuple[Float[Tensor, "out in"], int]:
        """The M nearest to every expert under its own covariance, argmin sum_t a_t |(M - C_t) C_t^T|_F^2, of least norm.

        M = (sum_t a_t C_t S_t) S^+, where S^+ leaves out the eigenvalues of S up to rtol of the largest; and how many are left.
        """
        if self._is_very_wide(a):
            stack, outer = self._stack(a)  # S = X^T X and X X^T have the same eigenvalues, and
            B = self._own_blocks(outer, a)
            divide, rank = pseudo_inverse(outer, rtol)
            return divide(B) @ stack, rank  # B X (X^T X)^+ = B (X X^T)^+ X
        S, CS = self._primal_covariance(a)
        divide, rank = pseudo_inverse(S, rtol)
        return divide(CS), rank

    def least_squares_from(
        self, start: Float[Tensor, "out in"], a: Sequence[float], gains: Gains
    ) -> tuple[Float[Tensor, "out in"], int]:
        """The same, solved from `start` one eigendirection of S at a time: start + R g(S), R = sum_t a_t C_t S_t - start S.

        Along a direction of eigenvalue l, g(l) = 1/l gives the minimum and g(l) = 0 the start; and how many g does not make zero.
        """
        if self._is_very_wide(a):
            stack, outer = self._stack(a)
            R = self._own_blocks(outer, a) - start @ stack.T  # R = (this) X, and X g(X^T X) = g(X X^T) X
            apply, used = spectral_function(outer, gains)
            return start + apply(R) @ stack, used
        S, CS = self._primal_covariance(a)
        add_symmetric_product(CS, start, S, -1.0)
        apply, used = spectral_function(S, gains)
        return start + apply(CS), used

    def _is_very_wide(self, a: Sequence[float]) -> bool:
        return len(a) * self._rows < self._columns

    def _primal_covariance(
        self, a: Sequence[float], chosen: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "in in"], Float[Tensor, "out in"]]:
        """S and sum_t a_t C_t S_t over the chosen experts: all of them unless told otherwise."""
        S = self._zeros(self._columns, self._columns)
        CS = self._zeros(self._rows, self._columns)
        weighted = list(zip(range(len(a)) if chosen is None else chosen, a, strict=True))
        add = self._add_through_covariances if self._columns <= self._rows else self._add_through_outer_grams
        few = min(available_threads(), AT_ONCE)
        for start in range(0, len(weighted), few):
            add(S, CS, weighted[start : start + few])
        return S, CS

    def _add_through_covariances(self, S: Tensor, CS: Tensor, weighted: Weighted) -> None:
        """Tall or square: every S_t once, then C_t S_t."""
        covariances = share(self._covariance, [t for t, _ in weighted])
        for (_, weight), S_t in zip(weighted, covariances, strict=True):
            S.add_(S_t, alpha=weight)

        def add_products(rows: slice) -> None:
            for (t, weight), S_t in zip(weighted, covariances, strict=True):
                add_symmetric_product(CS[rows], self._centred(t, rows), S_t, weight)

        share(add_products, shared_rows(CS))

    def _covariance(self, t: int) -> Float[Tensor, "in in"]:
        """The lower triangle of S_t."""
        S_t = self._zeros(self._columns, self._columns)
        for rows in row_blocks(self._rows, self._columns):
            add_gram(S_t, self._centred(t, rows))
        return S_t

    def _add_through_outer_grams(self, S: Tensor, CS: Tensor, weighted: Weighted) -> None:
        """Wide: C_t S_t = (C_t C_t^T) C_t, and S takes one SYRK."""
        everything = slice(0, self._rows)
        centred = share(lambda own: self._centred(own[0], everything), weighted)
        outer = share(self._outer_gram, centred)
        for (_, weight), C, CC in zip(weighted, centred, outer, strict=True):
            add_gram(S, C, weight)
            add_product(CS, mirror_lower(CC), C, weight)

    def _outer_gram(self, C: Float[Tensor, "rows in"]) -> Float[Tensor, "rows rows"]:
        """The lower triangle of C C^T."""
        outer = self._zeros(C.shape[0], C.shape[0])
        add_gram(outer, C.T)
        return outer

    def _stack(self, a: Sequence[float]) -> tuple[Float[Tensor, "stacked in"], Float[Tensor, "stacked stacked"]]:
        """Very wide: the stacked rows X of sqrt(a_t) C_t, and their (T m) x (T m) Gram X X^T."""
        everything = slice(0, self._rows)
        rows = self._rows
        stack = self._zeros(len(a) * rows, self._columns)  # filled one by one: side by side they would be there twice
        for t, weight in enumerate(a):
            torch.mul(self._centred(t, everything), math.sqrt(weight), out=stack[t * rows : (t + 1) * rows])
        return stack, mirror_lower(self._outer_gram(stack))

    def _own_blocks(self, outer: Float[Tensor, "stacked stacked"], a: Sequence[float]) -> Float[Tensor, "out stacked"]:
        """B = [sqrt(a_1) C_1 C_1^T ... sqrt(a_T) C_T C_T^T], for sum_t a_t C_t S_t = B X."""
        blocks = (slice(t * self._rows, (t + 1) * self._rows) for t in range(len(a)))
        return torch.cat([outer[own, own] / math.sqrt(weight) for own, weight in zip(blocks, a, strict=True)], 1)
