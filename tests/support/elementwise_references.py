"""Trimming, TIES and dropping as plain float64 transcriptions: what several entry-by-entry methods are made of."""

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
