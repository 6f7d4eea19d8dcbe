"""Exact whole-model magnitude thresholds in bounded memory.

"The k-th smallest magnitude of an expert's whole task vector" without holding the vector: the bit pattern of a non-negative
float32 grows with its value, so two histograms of 16 bits each, one pass over the model for each, find the value exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acemerge.numerics.linalg import row_blocks

_BINS = 2**16


def count_of_share(size: int, share: float) -> int:
    """floor(size * share), of the share as it was written: 0.29 * 100 is 28.999999999999996 in floating point.

    >>> count_of_share(100, 0.29)
    29
    """
    return math.floor(size * share * (1 + 2**-51))


_COUNTING = Lock()  # of all threads; not an attribute, because statistics travel between processes


class MagnitudeThresholds:
    """Per expert, the magnitude c such that the entries >= c are the kept share of its task vector.

    c is the (d - floor(d * keep))-th smallest of the d magnitudes (rounded to float32); with keep = 1 nothing is dropped.
    """

    def __init__(self, keep: float | Sequence[float]) -> None:
        self._keep = keep  # of all experts, or of each in the order in which they are observed
        self._keep_of: dict[str, float] = {}
        self._counts: dict[str, NDArray[np.intp]] = {}
        self._chosen: dict[str, tuple[int, int]] | None = None
        """After the first pass, per expert: the upper half of the threshold's bits, and its rank among those that share it."""
        self._thresholds: dict[str, float] = {}

    def observe(self, task_vectors: Tensor, experts: Sequence[str]) -> None:
        """Count one tensor's magnitudes, or a piece's: their upper halves in the first pass, then the lower halves of those that
        matter. May be called from several threads.
        """
        keep = self._keep if isinstance(self._keep, Sequence) else [self._keep] * len(experts)
        self._keep_of.update(zip(experts, keep, strict=True))
        for expert, task_vector in zip(experts, task_vectors, strict=True):
            for bits in _bit_patterns(task_vector):
                half = bits >> 16 if self._chosen is None else bits[bits >> 16 == self._chosen[expert][0]] & 0xFFFF
                histogram = np.bincount(half, minlength=_BINS)
                with _COUNTING:
                    self._counts[expert] = self._counts[expert] + histogram if expert in self._counts else histogram

    def end_pass(self) -> bool:
        """Narrow down; whether the other half of the bits is still needed."""
        if all(keep >= 1 for keep in self._keep_of.values()):
            return False
        if self._chosen is None:
            self._chosen = {expert: _locate(counts, self._rank(expert, counts)) for expert, counts in self._counts.items()}
            self._counts = {}
            return True
        for expert, (upper, rank) in self._chosen.items():
            if self._keep_of[expert] >= 1:
                continue
            lower, _ = _locate(self._counts[expert], rank)
            self._thresholds[expert] = float(torch.tensor(upper << 16 | lower, dtype=torch.int32).view(torch.float32))
        self._counts = {}
        return False

    def _rank(self, expert: str, counts: NDArray[np.intp]) -> int:
        total = int(counts.sum())
        return max(1, total - count_of_share(total, self._keep_of[expert]))

    def threshold(self, expert: str) -> float:
        """The smallest magnitude that is kept."""
        return self._thresholds.get(expert, 0.0)


def trim(task_vector: Tensor, threshold: float) -> Tensor:
    """The task vector with 0 for every entry whose magnitude, rounded to float32, does not reach the threshold."""
    if task_vector.dtype == torch.float32:
        below = np.nextafter(np.float32(threshold), np.float32(0))  # what is beyond it reaches the threshold
        return torch.nn.functional.hardshrink(task_vector, float(below))
    return task_vector * (task_vector.abs().float() >= threshold)


def _bit_patterns(task_vector: Tensor) -> Iterator[NDArray[np.int32]]:
    """The bit patterns of the magnitudes, a block at a time."""
    flat = task_vector.reshape(-1)
    for block in row_blocks(flat.numel(), 1):
        yield flat[block].abs().float().cpu().numpy().view(np.int32)


def _locate(counts: NDArray[np.intp], rank: int) -> tuple[int, int]:
    """The bin that holds the rank-th smallest value (from 1), and the rank within that bin."""
    cumulative = counts.cumsum()
    found = int(np.searchsorted(cumulative, rank))
    before = int(cumulative[found - 1]) if found else 0
    return found, rank - before
