"""Methods built on singular vectors and Gram matrices as plain float64 transcriptions.

Each forms full SVDs, explicit Gram matrices and one term per expert, so that each line can be read against the formula.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from spectral_cases import Array


def truncated(matrix: Array, k: int) -> Array:
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray((u[:, :k] * s[:k]) @ vh[:k])


def polar(matrix: Array) -> Array:
    u, _, vh = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vh)


def reference_cart(tau: Array, *, scale: float = 2.0, rank: float = 0.12) -> Array:
    T, m, n = tau.shape
    A = sum(tau[t] for t in range(T)) / T
    k = max(1, math.floor(rank * min(m, n) + 1e-9)) if rank > 0 else 0
    return np.asarray(A + scale * sum(truncated(tau[t] - A, k) for t in range(T)))


def reference_tsv_m(tau: Array) -> Array:
    T, m, n = tau.shape
    k = min(m, n) // T
    factors = [np.linalg.svd(tau[t], full_matrices=False) for t in range(T)]
    X = np.concatenate([u[:, :k] for u, _, _ in factors], axis=1)
    sigma = np.concatenate([s[:k] for _, s, _ in factors])
    Y = np.concatenate([vh[:k] for _, _, vh in factors], axis=0)
    return np.asarray(polar(X) @ np.diag(sigma) @ polar(Y))


def reference_iso_c(tau: Array) -> Array:
    u, s, vh = np.linalg.svd(tau.sum(0), full_matrices=False)
    return np.asarray(s.mean() * u @ vh)


def reference_iso_cts(tau: Array, *, common: float = 0.8) -> Array:
    T, m, n = tau.shape
    r = min(m, n)
    q = round((r - math.floor(common * r + 1e-9)) / T)
    k = r - q * T
    u, s, vh = np.linalg.svd(tau.sum(0), full_matrices=False)
    own = [np.linalg.svd(tau[t] - u[:, :k] @ u[:, :k].T @ tau[t], full_matrices=False) for t in range(T)]
    X = np.concatenate([*(u_t[:, :q] for u_t, _, _ in own), u[:, :k]], axis=1)
    sigma = np.concatenate([*(s_t[:q] for _, s_t, _ in own), s[:k]])
    Y = np.concatenate([*(vh_t[:q] for _, _, vh_t in own), vh[:k]], axis=0)
    return np.asarray(sigma.mean() * polar(X) @ polar(Y))


def closed_form(tau: Array, weights: list[float], rtol: float | None) -> Array:
    """N S^+ with S = X^T X of the stacked X = sqrt(w_t) D_t: X's own singular values are surer than the eigenvalues of S."""
    T, _, n = tau.shape
    N = sum(weights[t] * tau[t] @ (tau[t].T @ tau[t]) for t in range(T))
    _, s, vh = np.linalg.svd(np.concatenate([math.sqrt(weights[t]) * tau[t] for t in range(T)]), full_matrices=False)
    kept = s**2 > (n * 2.0**-23 if rtol is None else rtol) * s[0] ** 2
    return np.asarray((N @ vh[kept].T / s[kept] ** 2) @ vh[kept])


def reference_actmat(tau: Array, *, rtol: float | None = None) -> Array:
    return closed_form(tau, [1.0] * len(tau), rtol)


def reference_wudi_closed(tau: Array, *, mode: str = "closed_form", rtol: float | None = None) -> Array:
    return closed_form(tau, [1 / float(np.sum(delta**2)) for delta in tau], rtol)


def wudi_loss(M: Tensor, tau: Tensor) -> Tensor:
    return torch.stack([(((M - delta) @ delta.T) ** 2).sum() / (delta**2).sum() for delta in tau]).sum()


def reference_wudi(tau: Array, *, steps: int = 300, lr: float = 1e-5) -> Array:
    """Automatic differentiation of the loss and torch's own Adam."""
    vectors = torch.from_numpy(tau)
    M = vectors.sum(0).clone().requires_grad_(True)
    adam = torch.optim.Adam([M], lr=lr, weight_decay=0)
    for _ in range(steps):
        adam.zero_grad()
        wudi_loss(M, vectors).backward()
        adam.step()
    return np.asarray(M.detach().numpy())


def reference_ties(vectors: list[Array], keep: float, how: str) -> list[Array]:
    """TIES over several tensors' [task, ...] arrays with one threshold per task; the merged arrays."""
    T = len(vectors[0])
    flat = np.stack([np.concatenate([v[t].ravel() for v in vectors]) for t in range(T)])
    d = flat.shape[1]
    if keep < 1:
        rank = max(1, d - math.floor(d * keep + 1e-9))
        cuts = [np.sort(np.abs(flat[t]).astype(np.float32))[rank - 1] for t in range(T)]
        flat = np.stack([np.where(np.abs(flat[t]).astype(np.float32) >= cuts[t], flat[t], 0.0) for t in range(T)])
    sign = np.sign(flat.sum(0))
    sign = np.where(sign == 0, 1.0 if sign.sum() > 0 else -1.0, sign)
    merged = np.zeros(d)
    for j in range(d):
        agreeing = [flat[t, j] for t in range(T) if flat[t, j] * sign[j] > 0]
        merged[j] = sum(agreeing) / (max(1, len(agreeing)) if how == "mean" else 1)
    sizes = np.cumsum([v[0].size for v in vectors])[:-1]
    return [part.reshape(v[0].shape) for part, v in zip(np.split(merged, sizes), vectors, strict=True)]


def reference_knots(
    tensors: list[Array],
    *,
    keep: float = 0.2,
    merge: str = "mean",
    shared: str = "output",
    spectrum: str = "before",
    cut: float = 1e-5,
    drop: Callable[[int, int, Array], Array] = lambda index, t, Z: Z,
) -> list[Array]:
    bases, coordinates = [], []
    for index, tau in enumerate(tensors):
        side = tau if shared == "output" else tau.transpose(0, 2, 1)
        u, s, vh = np.linalg.svd(np.concatenate(list(side), axis=1), full_matrices=False)
        p = max(1, int(np.sum(s > cut)))
        V = np.split(vh[:p], len(side), axis=1)
        bases.append(u[:, :p] if spectrum == "before" else u[:, :p] * s[:p])
        Z = np.stack([s[:p, None] * V_t if spectrum == "before" else V_t for V_t in V])
        coordinates.append(np.stack([drop(index, t, Z[t]) for t in range(len(Z))]))
    merged = [u @ z for u, z in zip(bases, reference_ties(coordinates, keep, merge), strict=True)]
    return merged if shared == "output" else [M.T for M in merged]


def reference_core(tau: Array) -> tuple[Array, Array, Array]:
    """U_B, V_A and the cores, from balanced factors B_t A_t."""
    factors = [np.linalg.svd(delta, full_matrices=False) for delta in tau]
    ranks = [int(np.sum(s > 1e-6 * s[0])) if s[0] > 0 else 0 for _, s, _ in factors]
    B = np.concatenate([u[:, :r] * np.sqrt(s[:r]) for (u, s, _), r in zip(factors, ranks, strict=True)], axis=1)
    A = np.concatenate([np.sqrt(s[:r])[:, None] * vh[:r] for (_, s, vh), r in zip(factors, ranks, strict=True)], axis=0)
    u, s, _ = np.linalg.svd(B, full_matrices=False)
    U = u[:, s > 1e-6 * s[0]]
    _, s, vh = np.linalg.svd(A, full_matrices=False)
    V = vh[s > 1e-6 * s[0]].T
    return U, V, np.stack([U.T @ delta @ V for delta in tau])
