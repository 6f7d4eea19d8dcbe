"""Pico: output directions that many experts share toned down before a merge, and the merge given an expert's length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.methods.inner import (
    InnerOptions,
    PreparedStatistics,
    inner_core_sides,
    inner_facts,
    merge_prepared,
    prepared_statistics,
)
from acemerge.methods.registry import Context, Merged, method
from acemerge.numerics.linalg import add_gram, changed_tasks, cholesky_solver, sum_of_squares


@dataclass(frozen=True)
class PicoOptions(InnerOptions):
    """The inner method's scale cancels: the merge gets the mean length of the experts."""

    outer: ClassVar[str] = "pico"


def calibrated(task_vectors: Float[Tensor, "task out in"], context: Context) -> tuple[Float[Tensor, "task out in"], Context]:
    """tau'_t = U diag(a) U^T tau_t, where [tau_1 ... tau_T] = U diag(s) ., c_i = s_i^2 / sum s^2 and a_i = 1 / (1 + (T - 1) c_i).

    No decomposition is needed: with G = sum_t tau_t tau_t^T = U diag(s^2) U^T that is (I + (T - 1) G / tr G)^-1 tau_t.
    """
    T, rows = len(changed_tasks(task_vectors)), task_vectors.shape[1]
    prepared = task_vectors.to(torch.float64, copy=True)
    if T < 2:
        return prepared, context
    G = torch.zeros(rows, rows, dtype=torch.float64, device=task_vectors.device)
    for tau in prepared:
        add_gram(G, tau.T.contiguous())
    ridge = float(G.diagonal().sum()) / (T - 1)
    divide = cholesky_solver(G, ridge)
    for tau in prepared:
        tau.copy_(divide(tau.T.contiguous()).T).mul_(ridge)
    return prepared, context


def _statistics(options: PicoOptions, experts: tuple[str, ...]) -> PreparedStatistics | None:
    return prepared_statistics(options, experts, calibrated)


@method(
    "pico",
    title="Pico",
    paper="Pico, arXiv 2604.16826, 2026",
    statistics=_statistics,
    low_rank=inner_core_sides,
    facts=lambda options: {"rescaled": "what the inner merge was multiplied by to have a length", **inner_facts(options)},
    flops=lambda tasks, rows, columns: 3.0 * tasks * rows * rows * columns + rows**3 / 3 + 2.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (tasks + 4.0) * rows * columns + rows * rows,
)
def pico(task_vectors: Float[Tensor, "task out in"], options: PicoOptions, context: Context) -> Merged:
    """A step before another method: outputs that LoRA experts share count less; the merge is as long as an expert.

    What the experts write most of, together, is toned down, by up to T times; the inner method merges what is left; its merge
    is given the mean length of the experts.
    """
    prepared, _ = calibrated(task_vectors, context)
    merged = merge_prepared(options, prepared, context)
    changed = changed_tasks(task_vectors)
    length = math.sqrt(sum_of_squares(merged.delta))
    wanted = sum(math.sqrt(sum_of_squares(task_vectors[t])) for t in changed) / max(1, len(changed))
    factor = wanted / length if length else 0.0
    return replace(merged, delta=merged.delta.double() * factor, facts={"rescaled": factor, **merged.facts})
