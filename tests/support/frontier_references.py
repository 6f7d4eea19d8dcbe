"""Methods of 2026 as plain float64 transcriptions of their formulas: full decompositions, one term per expert, no shortcuts."""

import math

import numpy as np

from spectral_cases import Array


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
