"""Methods of 2026 as plain float64 transcriptions of their formulas: full decompositions, one term per expert, no shortcuts."""

import math

import numpy as np

from elementwise_references import exact_floor
from spectral_cases import Array
from spectral_references import polar, truncated


def wudi_system(tau: Array) -> tuple[Array, Array]:
    """C = sum_t w_t G_t and B = sum_t w_t D_t G_t, w_t = 1 / |D_t|^2."""
    C = np.zeros((tau.shape[2], tau.shape[2]))
    B = np.zeros(tau.shape[1:])
    for D in tau:
        w = 1 / np.linalg.norm(D) ** 2
        C += w * D.T @ D
        B += w * D @ D.T @ D
    return C, B


def reference_swudi(tau: Array, *, steps: float = 300.0, keep: float = 0.65) -> Array:
    C, B = wudi_system(tau)
    n = len(C)
    values, V = np.linalg.eigh(C)
    K = math.ceil(keep * n - 1e-9)
    theta0 = tau.sum(0)
    M = theta0.copy()
    for i in range(n - K, n):
        value, v = max(values[i], 1e-300), V[:, i : i + 1]
        f = 1 - math.exp(-value * steps) if value * steps > 1e-8 else value * steps
        M += -f * theta0 @ v @ v.T + f / value * B @ v @ v.T
    return np.asarray(M)


def reference_swudi_a(tau: Array) -> Array:
    C, B = wudi_system(tau)
    values, V = np.linalg.eigh(C)
    values = np.where(values > 1e-10 * values[-1], values, 0.0)
    K = math.ceil(np.sqrt(values).sum() ** 2 / values.sum() - 1e-9)
    V_K, l_K = V[:, -K:], values[-K:]
    return np.asarray(tau.sum(0) @ (np.eye(len(C)) - V_K @ V_K.T) + B @ V_K @ np.diag(1 / l_K) @ V_K.T)


def reference_svc(tau: Array, D: Array, a: float) -> Array:
    """The calibrated D, direction by direction."""
    U, s, Vh = np.linalg.svd(D, full_matrices=False)
    M = np.zeros_like(D)
    for i in range(len(s)):
        b = U[:, i] @ D
        projections = []
        for delta in tau:
            c = U[:, i] @ delta
            projections.append(max(float(b @ c) / max(float(c @ c), 1e-12), a))
        M += len(tau) / sum(projections) * s[i] * np.outer(U[:, i], Vh[i])
    return M


def reference_boosting(D: Array, share: float) -> Array:
    U, s, Vh = np.linalg.svd(D, full_matrices=False)
    cutoff = next(i for i in range(len(s)) if s[: i + 1].sum() / s.sum() >= share - 1e-12)
    return np.asarray(U @ np.diag([max(value, s[cutoff]) for value in s]) @ Vh)


def reference_star(tau: Array, *, keep: float = 0.4) -> Array:
    total = np.zeros(tau.shape[1:])
    for delta in tau:
        U, s, Vh = np.linalg.svd(delta, full_matrices=False)
        k = next(k for k in range(1, len(s) + 1) if s[:k].sum() >= keep * s.sum() * (1 - 1e-12))
        total += U[:, :k] @ np.diag(s[:k] * s.sum() / s[:k].sum()) @ Vh[:k]
    return total / len(tau)


def reference_dc_merge(
    tau: Array, *, rank: int | None = None, smoothing: str = "none", ratio: float = 5.0, density: float = 1e-3
) -> Array:
    """For experts of full rank whose number divides min(m, n), as published: dense masks, all of A_t at once."""
    T, m, n = tau.shape
    r = min(m, n)
    q = r // T if rank is None else rank
    side = r if rank is None else q * T
    X, Y, parts = np.zeros((m, side)), np.zeros((side, n)), []
    for t in range(T):
        U, s, Vh = np.linalg.svd(tau[t], full_matrices=False)
        e = s[:q]
        if smoothing == "average":
            e = np.full(q, e.sum() / q)
        elif smoothing == "linear":
            line = np.linspace(min(ratio, e[0] / e[-1]), 1, q)
            e = line * e.sum() / line.sum()
        X[:, t * q : (t + 1) * q], Y[t * q : (t + 1) * q] = U[:, :q], Vh[:q]
        parts.append(U[:, :q] @ np.diag(e) @ Vh[:q])
    P, Q = polar(X), polar(Y)
    A = np.stack([P.T @ part @ Q.T for part in parts])
    kk = max(1, exact_floor(side**2, density))
    for t in range(T):
        threshold = np.sort(np.abs(A[t]).ravel())[::-1][kk - 1]
        A[t][np.abs(A[t]) < threshold * (1 - 1e-9)] = 0
    sign = np.sign(A.sum(0))
    B = np.zeros((side, side))
    for i in range(side):
        for j in range(side):
            agreeing = [A[t, i, j] for t in range(T) if np.sign(A[t, i, j]) == sign[i, j] != 0]
            if agreeing and i // q == j // q:
                B[i, j] = sum(agreeing) / len(agreeing)
    return np.asarray(P @ B @ Q)


def reference_resmerge(tau: Array, *, directions: int = 1, head_share: float = 0.2, trust: float = 0.3) -> Array:
    T = len(tau)
    H = np.stack([truncated(delta, directions) for delta in tau])
    R = tau - H
    lengths = [np.linalg.norm(residual) for residual in R]
    q = np.stack([residual / length for residual, length in zip(R, lengths, strict=True)])
    g = q.sum(0) / np.linalg.norm(q.sum(0))
    c = min(1.0, max(0.0, float(np.mean([np.sum(q[t] * g) for t in range(T)]))))
    pairs = [(s, t) for s in range(T) for t in range(s)]
    pbar = float(np.mean([np.sum(q[s] * q[t]) for s, t in pairs])) if pairs else 1.0
    beta = 1 - trust * 0.5 * ((pbar + 1) / 2 + (c + 1) / 2)
    A = R.mean(0) if c <= 1 / math.sqrt(T) + 1e-12 else c**beta * float(np.mean(lengths)) * g
    cosines = [np.sum(H[s] * H[t]) / np.linalg.norm(H[s]) / np.linalg.norm(H[t]) for s, t in pairs]
    SH = float(np.mean([max(0.0, cosine) for cosine in cosines])) if pairs else 1.0
    Hbar = H.mean(0)
    return np.asarray(A + head_share * SH * np.linalg.norm(A) * Hbar / np.linalg.norm(Hbar))


def reference_tact(tau: Array, *, keep: float = 0.5, rtol: float | None = None) -> Array:
    _, m, n = tau.shape
    S, N = np.zeros((n, n)), np.zeros((m, n))
    for delta in tau:
        e = np.zeros(m * n)
        largest = np.argsort(-np.abs(delta.ravel()), kind="stable")[: max(1, round(keep * m * n))]
        e[largest] = delta.ravel()[largest]
        C = e.reshape(m, n).T @ e.reshape(m, n)
        S, N = S + C, N + delta @ C
    return np.asarray(N @ np.linalg.pinv(S, rcond=n * 2.0**-23 if rtol is None else rtol, hermitian=True))


def orthonormal(columns: Array, cut: float = 1e-6) -> Array:
    """Left singular vectors whose value is above the cut, in terms of the largest if that is above 1."""
    if not columns.size:
        return columns
    U, s, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(U[:, s > cut * max(1.0, s[0])])


def reference_pact_bases(tau: Array, W0: Array, *, base_share: float = 0.8, rewritten: int = 10) -> list[Array]:
    """R_t: what each expert relies on."""
    r = min(W0.shape)
    V0 = np.linalg.svd(W0)[2][: max(1, exact_floor(r, base_share))].T
    bases = []
    for delta in tau:
        V = np.linalg.svd(delta)[2][: min(rewritten, r)].T
        bases.append(orthonormal((np.eye(len(V0)) - V @ V.T) @ V0))
    return bases


def reference_pact_filter(tau: Array, W0: Array, *, base_share: float = 0.8, rewritten: int = 10) -> Array:
    R = reference_pact_bases(tau, W0, base_share=base_share, rewritten=rewritten)
    filtered = []
    for j, delta in enumerate(tau):
        S = orthonormal(np.concatenate([R[t] for t in range(len(tau)) if t != j], axis=1))
        filtered.append(delta - delta @ S @ S.T)
    return np.stack(filtered)


def reference_pico_filter(tau: Array) -> Array:
    T = len(tau)
    U, s, _ = np.linalg.svd(np.concatenate(list(tau), axis=1), full_matrices=False)
    c = s**2 / np.sum(s**2)
    a = 1 / (1 + (T - 1) * c)
    return np.stack([delta + U @ np.diag(a - 1) @ U.T @ delta for delta in tau])


def mean_length(M: Array, tau: Array) -> Array:
    """M as long as the experts are on average."""
    return np.asarray(M * np.mean([np.linalg.norm(delta) for delta in tau]) / np.linalg.norm(M))


def larv_effective_rank(A: Array) -> float:
    p = np.linalg.svd(A, compute_uv=False) ** 2 / np.linalg.norm(A) ** 2
    return math.exp(-sum(value * math.log(value) for value in p if value > 1e-300))


def larv_commutator(W0: Array, tau: Array) -> float:
    terms = np.linalg.norm(W0 @ tau.T - tau @ W0.T) + np.linalg.norm(W0.T @ tau - tau.T @ W0)
    return float(0.5 * terms / np.linalg.norm(W0) / np.linalg.norm(tau))


def larv_scores(bases: list[Array], changes: list[Array], layers: list[int], eta: float = 1.0, rho: float = 0.5) -> Array:
    """One matrix and its number of layer (from 0) after the other."""
    c = np.array([larv_commutator(W0, tau) for W0, tau in zip(bases, changes, strict=True)])
    e = np.array([larv_effective_rank(W0) / larv_effective_rank(tau) for W0, tau in zip(bases, changes, strict=True)])
    z = (c - c.mean()) / (c.std() if c.std() >= 1e-8 else 1.0)
    d = (np.array(layers) + 1) / (max(layers) + 1)
    return np.asarray(e**eta * d**rho / (np.log1p(np.exp(z)) + 1))
