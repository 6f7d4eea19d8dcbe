"""A plain, slow float64 transcription of ACE-Merging (one tensor at a time): the oracle the tests compare against.

Every matrix of the procedure is formed explicitly and every expert is visited in a Python loop, so that each line can
be read against the definition. m = d_out (rows), n = d_in (columns), T experts.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceMerge:
    """What the procedure gives, and what a test needs to know about how it got there."""

    merged: Array  # alpha * M
    pre: Array  # P, before the refinement
    gamma: float
    heterogeneous: bool
    spectrum: Array  # singular values of F, largest first; empty when nothing was refined
    kept: int  # k of the refinement, after the cap at the rank of F; 0 when nothing was refined


def heterogeneity(energies: list[float]) -> float:
    """Sample variance of the log energies over their squared mean; 0 for one expert."""
    T = len(energies)
    if T == 1:
        return 0.0
    logs = [math.log(energy) for energy in energies]
    mean = sum(logs) / T
    variance = sum((value - mean) ** 2 for value in logs) / (T - 1)
    if mean == 0.0:  # the quotient's limit: no spread is homogeneous, any spread is infinitely heterogeneous
        return math.inf if variance > 0.0 else 0.0
    return variance / mean**2


def numerical_rank(matrix: Array, singular_values: Array) -> int:
    """How many singular values stand out of the float64 rounding of the largest."""
    return int(np.sum(singular_values > max(matrix.shape) * np.finfo(np.float64).eps * singular_values[0]))


def row_space(matrix: Array) -> Array:
    """An orthonormal basis, one vector per row, of the span of a matrix's rows."""
    _, s, Vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(Vt[: numerical_rank(matrix, s)])


def reference_ace(
    task_vectors: Array,
    *,
    epsilon: float,
    tau: float = 0.3,
    k_frac: float = 0.3,
    alpha: float = 1.0,
    normalise: bool = True,
    prior: bool = True,
    refine: bool = True,
) -> ReferenceMerge:
    """Merge task vectors [T, m, n] by the letter of the layer procedure, in float64."""
    _, m, n = task_vectors.shape
    no_spectrum = np.zeros(0)

    # An expert that did not change this tensor is left out; T counts the others.
    D = [np.asarray(delta, dtype=np.float64) for delta in task_vectors if np.any(delta != 0)]
    T = len(D)
    if T == 0:
        return ReferenceMerge(np.zeros((m, n)), np.zeros((m, n)), 0.0, False, no_spectrum, 0)

    # 1. Energies of the uncentred task vectors, and the branch.
    energies = [float(np.sum(D[t] ** 2)) for t in range(T)]
    gamma = heterogeneity(energies)
    heterogeneous = gamma > tau

    # 2. Centred task vectors, their Gram matrices and traces.
    ones_m = np.ones((m, 1))
    C = [D[t] - ones_m @ D[t].mean(axis=0, keepdims=True) for t in range(T)]
    S = [C[t].T @ C[t] for t in range(T)]
    tr = [float(np.trace(S[t])) for t in range(T)]

    # 3. Normalisation and ridge.
    if heterogeneous and normalise:
        if min(tr) == 0.0:
            raise ValueError("a task vector whose rows are all equal has no trace to normalise by")
        a = [1.0 / tr[t] for t in range(T)]
        e = [epsilon / tr[t] for t in range(T)]
    else:
        a = [1.0] * T
        e = [epsilon] * T
    S_tilde = [a[t] * S[t] for t in range(T)]
    S_reg = [S_tilde[t] + e[t] * np.eye(n) for t in range(T)]

    # 4. The prior: the mean row of sum_t S_tilde_t, repeated in every row.
    c = np.zeros((1, n))
    if prior:
        c = np.sum(S_tilde, axis=0).mean(axis=0, keepdims=True)
        if heterogeneous:
            c = c / (sum(energies) / T)

    # 5. P A = N, solved as A^T P^T = N^T.
    A = np.sum(S_reg, axis=0) + np.ones((n, 1)) @ c
    N = np.sum([C[t] @ S_reg[t] for t in range(T)], axis=0)
    P = np.linalg.solve(A.T, N.T).T
    if not (heterogeneous and refine):
        return ReferenceMerge(alpha * P, P, gamma, heterogeneous, no_spectrum, 0)

    # 6. The refinement, with the uncentred task vectors in the residual.
    mean_S_reg = np.sum(S_reg, axis=0) / T
    R = np.sum([D[t] @ (S_tilde[t] - mean_S_reg) for t in range(T)], axis=0)
    # Exactly, every row of F is a combination of rows of the D_t, and every column one of their columns and the ones
    # vector. The solve leaves noise of about cond(A) * eps outside those spans, which the rank below would count when
    # the D_t are of low rank; projecting onto them takes away nothing else.
    rows = row_space(np.concatenate([D[t] / math.sqrt(energies[t]) for t in range(T)]))
    columns = row_space(np.concatenate([D[t].T / math.sqrt(energies[t]) for t in range(T)] + [ones_m.T / math.sqrt(m)]))
    F = columns.T @ columns @ (P + R) @ rows.T @ rows
    U, s, Vt = np.linalg.svd(F, full_matrices=False)
    # The floor is of the real product: k_frac is a decimal whose double may fall just short (0.29 * 100 gives
    # 28.999999999999996 in floating point), so a product within 1e-9 below an integer counts as that integer.
    k = min(math.floor(k_frac * min(m, n) + 1e-9), numerical_rank(F, s))
    M = P
    if k > 0:
        M = P + s[:k].mean() * (U[:, :k] @ Vt[:k, :])

    # 7. The caller adds alpha * M to the base weight.
    return ReferenceMerge(alpha * M, P, gamma, heterogeneous, s, k)


def well_posed(expected: ReferenceMerge) -> bool:
    """Whether the refinement is a function of its input at all: no tie at the cut, and one rank at either precision."""
    if expected.kept == 0:
        return True
    last, following = [*expected.spectrum, 0.0][expected.kept - 1 : expected.kept + 1]
    float32_rank_cut = max(expected.merged.shape) * np.finfo(np.float32).eps
    return bool(min((last - following) / 1e-6, last / float32_rank_cut) > expected.spectrum[0])
