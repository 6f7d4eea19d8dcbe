"""DELLA (MagPrune): drop small changes more often than large ones, then elect signs and average what agrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.dare_task_arithmetic import Probability
from acemerge.methods.expert_weights import NonNegativeWeights, check_count, check_each, each_expert, split_list, weight_each
from acemerge.methods.registry import Alpha, Context, Options, method
from acemerge.methods.ties import elect_and_merge
from acemerge.numerics.dropping import Rescale, Seed, drop
from acemerge.numerics.linalg import row_blocks, weighted_sum


@dataclass(frozen=True)
class MagPruneOptions(Options):
    """How entries are dropped. Defaults are the official README's."""

    drop: Annotated[
        Probability | tuple[Probability, ...],
        BeforeValidator(split_list),
        Field(description="mean share of entries dropped at random; one for all experts, or one each"),
    ] = 0.3
    window: Annotated[
        float, Field(ge=0, lt=1, description="how much less often a row's largest entry is dropped than its smallest; 0 is DARE")
    ] = 0.14
    rescale: Rescale = "inverse"
    seed: Seed = 0

    def __post_init__(self) -> None:
        for p in each_expert(self.drop, 1):
            smallest, largest = 1 - p - self.window / 2, 1 - p + self.window / 2
            # 1e-6: what a float32 draw can tell from probability 0, and rounding of sums such as 0.95 + 0.05.
            if smallest < 1e-6 or largest > 1 + 1e-6:
                raise InputError(
                    f"drop={p} and window={self.window} ask for keep probabilities from {smallest:.3g} to "
                    f"{largest:.3g}; give a window below {2 * min(p, 1 - p):.3g}, or another drop"
                )


@dataclass(frozen=True)
class DellaOptions(MagPruneOptions):
    """Weights and scale are the official README's too."""

    elect: Annotated[
        bool, Field(description="average the entries that agree with the elected sign; false: sum all of them (della_linear)")
    ] = True
    weights: NonNegativeWeights = "equal"
    alpha: Alpha = 1.1

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("drop", self.drop, experts)
        check_count(self.weights, experts)


def keep_probabilities(task_vector: Float[Tensor, "*shape"], keep: float, window: float) -> Float[Tensor, "*shape"]:
    """pi_j = keep - window / 2 + window (rank_j - 1) / (n - 1), ranks of magnitude along the last axis."""
    n = task_vector.shape[-1] if task_vector.dim() else 1
    if n < 2:  # nothing to rank: the mean probability
        return torch.full_like(task_vector, keep)
    rows = task_vector.reshape(-1, n)
    by_rank = torch.linspace(keep - window / 2, keep + window / 2, n, dtype=torch.float64, device=rows.device).to(rows.dtype)
    probabilities = torch.empty_like(rows)
    for block in row_blocks(*rows.shape):
        order = rows[block].abs().argsort(dim=1, stable=True)
        probabilities[block].scatter_(1, order, by_rank.expand_as(order))
    return probabilities.reshape(task_vector.shape)


def prune_each(
    task_vectors: Float[Tensor, "task *shape"], options: MagPruneOptions, context: Context
) -> Float[Tensor, "task *shape"]:
    """Every expert's d_t."""
    dropped = torch.empty_like(task_vectors)
    for task, drop_share in enumerate(each_expert(options.drop, len(task_vectors))):
        task_vector = task_vectors[task]
        keep = keep_probabilities(task_vector, 1 - drop_share, options.window)
        dropped[task] = drop(task_vector, keep, options.rescale, context.generator(options.seed, task))
    return dropped


@method(
    "della",
    title="DELLA-Merging",
    paper="Deep et al., DELLA-Merging: reducing interference through magnitude-based sampling, 2024",
    touches="all",
    ordered=True,
    flops=lambda tasks, rows, columns: 40.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.5 * tasks + 2.5) * rows * columns,
)
def della(task_vectors: Float[Tensor, "task *shape"], options: DellaOptions, context: Context) -> Float[Tensor, "*shape"]:
    """Drop entries at random, small ones of each row more often, rescale the others, and average those of the elected sign.

    The keep probability rises with an entry's rank of magnitude along the last axis, from 1 - drop - window/2 to
    1 - drop + window/2. The same seed gives the same model.
    """
    weights = weight_each(options.weights, context.experts, context.tensor)
    dropped = prune_each(task_vectors, options, context)
    if not options.elect:
        return weighted_sum(dropped, weights)
    return elect_and_merge(dropped, "mean", majority_sign=1, weights=weights)
