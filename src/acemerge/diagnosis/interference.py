"""Predicted interference: what a merge does to each expert's layer on the inputs that the expert's own change reveals.

ACE's layer objective, sum_t Tr[(W - W_t) Shat_t (W - W_t)^T], is each expert's loss under the covariance Shat_t = C_t^T C_t of
its inputs. With W = W0 + M it needs no data: expert t's term is J_t(M) = |(M - D_t) C_t^T|_F^2. Over J_t(0), which leaving the
base as it is costs, it is 0 where the merged layer does for expert t what the expert itself does, 1 where it does what the base
does, and above 1 where other experts' changes outweigh its own. The objective as a whole, sum_t J_t(M) / sum_t J_t(0), is what
methods are compared by: strong experts count for more in it, and one that hardly changed anything cannot decide it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.frame import Frame, standard_frame


class Objective:
    """The experts' covariances of one tensor, formed once and asked for every merge of it."""

    def __init__(self, task_vectors: Float[Tensor, "task out in"], frame: Frame | None) -> None:
        self._task_vectors = task_vectors
        self._frame = frame or standard_frame(task_vectors)
        self._rows, self._columns = task_vectors.shape[1:]
        self._tall = self._columns < self._rows
        self._readers = [self._reader(D) for D in task_vectors]
        zero = torch.zeros_like(task_vectors[0])
        self._of_base = [self._term(zero, t) for t in range(len(task_vectors))]

    def _reader(self, D: Tensor) -> Tensor:
        """C_t^T (in x out), or, of a tall matrix, C_t^T C_t (in x in): whichever is smaller to multiply by."""
        ones = self._frame.ones_out.to(D.dtype)
        C = D - torch.outer(ones, ones @ D) / self._frame.shape[0]
        return C.T @ C if self._tall else C.T

    def _term(self, M: Tensor, t: int) -> float:
        error = M.to(self._task_vectors.dtype) - self._task_vectors[t]
        seen = error @ self._readers[t]
        return float((seen * error).sum(dtype=torch.float64)) if self._tall else float(seen.square().sum(dtype=torch.float64))

    def of(self, M: Float[Tensor, "out in"]) -> tuple[list[float | None], float | None]:
        """Each expert's J_t(M) / J_t(0); None for an expert without a covariance of its own here. Then that of all together."""
        terms = [self._term(M, t) for t in range(len(self._of_base))]
        own = [term / base if base > 0 else None for term, base in zip(terms, self._of_base, strict=True)]
        return own, math.fsum(terms) / whole if (whole := math.fsum(self._of_base)) > 0 else None
