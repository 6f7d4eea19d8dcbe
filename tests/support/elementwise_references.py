"""Trimming, TIES, dropping and Breadcrumbs as plain float64 transcriptions: what several entry-by-entry methods are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from elementwise_cases import Array


def exact_floor(size: int, share: float) -> int:
    return int(Fraction(str(share)) * size)


def trim_reference(v: Array, keep: float) -> Array:
    """Keep the entries that reach the (d - floor(d k))-th smallest magnitude."""
    rank = len(v) - exact_floor(len(v), keep)
    threshold = sorted(abs(v))[rank - 1] if rank else 0.0
    return np.array([x if abs(x) >= threshold else 0.0 for x in v])


def ties_reference(vectors: Sequence[Array], keep: float, merge: str, pieces: Sequence[int] | None = None) -> Array:
    """Whole-model TIES on flattened vectors, entry by entry; `pieces` are the tensors' sizes if trimmed one by one."""
    cuts: list[int] = np.cumsum(pieces)[:-1].tolist() if pieces is not None else []
    u = np.array([np.concatenate([trim_reference(piece, keep) for piece in np.split(v, cuts)]) for v in vectors])
    totals = [math.fsum(u[:, j]) for j in range(u.shape[1])]
    majority = 1 if sum(np.sign(totals)) > 0 else -1
    merged = np.zeros(u.shape[1])
    for j, total in enumerate(totals):
        elected = np.sign(total) or majority
        agreeing = [x for x in u[:, j] if np.sign(x) == elected]
        merged[j] = sum(agreeing) / (max(1, len(agreeing)) if merge == "mean" else 1)
    return merged


def dare_reference(tau: Array, uniform: Array, p: float, rescale: str) -> Array:
    kept: Array = np.where(uniform < np.float32(1 - p), tau, 0.0)
    if rescale == "inverse":
        return kept / (1 - p)
    if rescale == "l1" and abs(kept).sum() > 0:
        return kept * float(abs(tau).sum() / abs(kept).sum())
    return kept


def della_probabilities(tau: Array, q: float, window: float) -> Array:
    """pi_j = (q - eps) + 2 eps (rank_j - 1) / (n - 1) along the last axis, ties in order of position."""
    if tau.ndim == 0:
        return np.array(q)
    n = tau.shape[-1]
    pi = np.zeros_like(tau)
    for index in np.ndindex(tau.shape[:-1]):
        order = sorted(range(n), key=lambda j: (abs(tau[index][j]), j))
        for rank, j in enumerate(order, 1):
            pi[index][j] = q - window / 2 + window * (rank - 1) / (n - 1) if n > 1 else q
    return pi


def della_reference(
    taus: Sequence[Array], uniforms: Sequence[Array], q: float, window: float, rescale: str, elect: bool, weights: Sequence[float]
) -> Array:
    ds = []
    for tau, uniform in zip(taus, uniforms, strict=True):
        pi = della_probabilities(tau, q, window)
        d = np.where(uniform < pi, tau, 0.0)
        if rescale == "inverse":
            d = d / pi
        elif rescale == "l1" and abs(d).sum() > 0:
            d = d * abs(tau).sum() / abs(d).sum()
        ds.append(d)
    weighted = np.array([w * d for w, d in zip(weights, ds, strict=True)])
    if not elect:
        return np.asarray(weighted.sum(0))
    merged = np.zeros(taus[0].shape)
    for index in np.ndindex(taus[0].shape):
        sign = 1.0 if math.fsum(weighted[(slice(None), *index)]) >= 0 else -1.0
        agreeing = [t for t in range(len(ds)) if np.sign(weighted[(t, *index)]) == sign]
        if agreeing:
            merged[index] = sum(weighted[(t, *index)] for t in agreeing) / sum(weights[t] for t in agreeing)
    return merged


def breadcrumbs_reference(tau: Array, keep: float, outliers: float, scope: str) -> Array:
    if tau.ndim == 0:
        return tau
    rows = tau.reshape(-1, tau.shape[-1] if scope == "row" else tau.size)
    masked = np.zeros_like(rows)
    n = rows.shape[1]
    for row, out in zip(rows, masked, strict=True):
        left = sorted(range(n), key=lambda j: (-abs(row[j]), j))[exact_floor(n, outliers) :]
        for j in left[: exact_floor(n, keep)]:
            out[j] = row[j]
    return masked.reshape(tau.shape)
