"""DARE with TIES: drop changes at random and rescale the rest, then trim, elect signs and average what agrees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.methods.dare_task_arithmetic import DareOptions, dare
from acemerge.methods.expert_weights import check_each, weight_each
from acemerge.methods.registry import Context, method
from acemerge.methods.ties import TiesOptions, TiesStatistics, elect_and_merge


@dataclass(frozen=True)
class DareTiesOptions(TiesOptions, DareOptions):
    """DARE's and TIES's own defaults, as in the official code: drop=0 is TIES."""

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("drop", self.drop, experts)
        super().check(experts)


def dare_each(task_vectors: Float[Tensor, "task *shape"], options: DareOptions, context: Context) -> Float[Tensor, "task *shape"]:
    """Every expert's d_t; the same in every pass, since the draws depend on names and the seed only."""
    dropped = torch.empty_like(task_vectors)
    for task, task_vector in enumerate(task_vectors):
        dropped[task] = dare(task_vector, options, context, task)
    return dropped


def dare_ties_statistics(options: DareTiesOptions, experts: tuple[str, ...]) -> TiesStatistics:  # noqa: ARG001
    """TIES's thresholds and majority sign, of the dropped and rescaled task vectors."""
    return TiesStatistics(options, prepare=lambda task_vectors, context: dare_each(task_vectors, options, context))


@method(
    "dare_ties",
    title="DARE + TIES-Merging",
    paper="Yu et al., Language models are Super Mario, ICML 2024",
    touches="all",
    statistics=dare_ties_statistics,
    flops=lambda tasks, rows, columns: 40.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (tasks + 2.0) * rows * columns,
)
def dare_ties(task_vectors: Float[Tensor, "task *shape"], options: DareTiesOptions, context: Context) -> Float[Tensor, "*shape"]:
    """Drop entries of each task vector at random, rescale the others, and merge what is left as TIES does.

    The thresholds are those of the dropped vectors: a share `keep` above 1 - `drop` trims nothing more. drop=0 is TIES. The
    same seed gives the same model.
    """
    statistics: TiesStatistics = context.statistics
    trimmed = statistics.trim(dare_each(task_vectors, options, context), context)
    weights = weight_each(options.weights, context.experts, context.tensor)
    return elect_and_merge(trimmed, options.merge, statistics.majority_sign, weights)
