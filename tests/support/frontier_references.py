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
        l, v = max(values[i], 1e-300), V[:, i : i + 1]
        f = 1 - math.exp(-l * steps) if l * steps > 1e-8 else l * steps
        M += -f * theta0 @ v @ v.T + f / l * B @ v @ v.T
    return np.asarray(M)


def reference_swudi_a(tau: Array) -> Array:
    C, B = wudi_system(tau)
    values, V = np.linalg.eigh(C)
    values = np.where(values > 1e-10 * values[-1], values, 0.0)
    K = math.ceil(np.sqrt(values).sum() ** 2 / values.sum() - 1e-9)
    V_K, l_K = V[:, -K:], values[-K:]
    return np.asarray(tau.sum(0) @ (np.eye(len(C)) - V_K @ V_K.T) + B @ V_K @ np.diag(1 / l_K) @ V_K.T)
