"""TACT: ACTMat under covariances of the largest entries of each task vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.actmat import KEPT_DIRECTIONS, Cut, closed_form_elements, closed_form_flops, relative_cut
from acemerge.methods.registry import Merged, Options, method
from acemerge.numerics.linalg import add_gram, add_product, changed_tasks, mirror_lower, pseudo_inverse


@dataclass(frozen=True)
class TactOptions(Options):
    """Half of the entries is what the authors' validation data chose for most models."""

    keep: Annotated[
        float, Field(gt=0, le=1, description="k: share of a task vector's entries, the largest, in its covariance")
    ] = 0.5
    rtol: Cut = "float32"


def largest_entries(tau: Float[Tensor, "out in"], keep: float) -> Float[Tensor, "out in"]:
    """tau with zeros for all but max(1, round(keep out in)) entries, exactly that many."""
    entries = tau.double().reshape(-1)
    kept = max(1, round(keep * len(entries)))
    chosen = entries.abs().topk(kept, sorted=False).indices
    trimmed = torch.zeros_like(entries)
    trimmed[chosen] = entries[chosen]
    return trimmed.reshape(tau.shape)


@method(
    "tact",
    title="TACT, trimmed ACTMat",
    paper="TACT, in the ACTMat authors' code, 2026",
    closed_form=True,
    facts=KEPT_DIRECTIONS,
    flops=lambda tasks, rows, columns: closed_form_flops(tasks, rows, columns) + 20.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: closed_form_elements(tasks, rows, columns) + 4.0 * rows * columns,
)
def tact(task_vectors: Float[Tensor, "task out in"], options: TactOptions) -> Merged:
    """ACTMat with cleaner covariances: M = (sum_t tau_t C_t)(sum_t C_t)^+, C_t made of the largest entries of tau_t alone.

    C_t = e_t^T e_t, where e_t keeps half of the entries of tau_t; what is merged stays the whole tau_t. With keep = 1 it is
    ACTMat.
    """
    changed = changed_tasks(task_vectors)
    if not changed:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64), {"active_experts": 0})
    m, n = task_vectors.shape[1:]
    rtol = relative_cut(options.rtol, n)
    if len(changed) * m < n:
        M, kept = _through_rows(task_vectors, changed, options.keep, rtol)
    else:
        M, kept = _through_columns(task_vectors, changed, options.keep, rtol)
    return Merged(M, {"active_experts": len(changed), "kept_directions": kept})


def _through_columns(task_vectors: Tensor, changed: list[int], keep: float, rtol: float) -> tuple[Float[Tensor, "out in"], int]:
    """N S^+ with S = sum_t e_t^T e_t (in x in) and N = sum_t tau_t e_t^T e_t, each product on its smaller side."""
    m, n = task_vectors.shape[1:]
    S, N = (torch.zeros(side, n, dtype=torch.float64, device=task_vectors.device) for side in (n, m))
    for t in changed:
        tau, e = task_vectors[t].double(), largest_entries(task_vectors[t], keep)
        if m <= n:
            add_gram(S, e)
            add_product(N, tau @ e.T, e)
        else:
            C = torch.zeros_like(S)
            add_gram(C, e)
            S += C
            add_product(N, tau, mirror_lower(C))
    divide, kept = pseudo_inverse(S, rtol)
    return divide(N), kept


def _through_rows(task_vectors: Tensor, changed: list[int], keep: float, rtol: float) -> tuple[Float[Tensor, "out in"], int]:
    """For few rows: S = X^T X with the stacked e_t as X, N = [tau_t e_t^T ...] X, and N S^+ = [tau_t e_t^T ...] (X X^T)^+ X."""
    trimmed = [largest_entries(task_vectors[t], keep) for t in changed]
    products = torch.cat([task_vectors[t].double() @ e.T for t, e in zip(changed, trimmed, strict=True)], 1)
    X = torch.cat(trimmed)
    outer = torch.zeros(len(X), len(X), dtype=torch.float64, device=X.device)
    add_gram(outer, X.T)
    divide, kept = pseudo_inverse(outer, rtol)
    return divide(products) @ X, kept
