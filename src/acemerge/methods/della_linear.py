"""Linear DELLA: drop small changes more often than large ones, then sum what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.della import MagPruneOptions, prune_each
from acemerge.methods.expert_weights import ExpertWeights, check_count, check_each, refuse_zero_sum, weight_each
from acemerge.methods.registry import Context, method
from acemerge.numerics.dropping import Rescale
from acemerge.numerics.linalg import weighted_sum


@dataclass(frozen=True)
class DellaLinearOptions(MagPruneOptions):
    """mergekit's rescaling and scale; it drops nothing unless asked to, so drop and window are DELLA's."""

    rescale: Rescale = "l1"
    weights: ExpertWeights = "equal"
    normalise: Annotated[bool, Field(description="divide the sum by that of the weights")] = False

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("drop", self.drop, experts)
        check_count(self.weights, experts)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalise:
            refuse_zero_sum("della_linear", self.weights, "give other weights, or normalise=false")


@method(
    "della_linear",
    title="Linear DELLA",
    paper="Deep et al., DELLA-Merging: reducing interference through magnitude-based sampling, 2024; as mergekit has it",
    touches="all",
    ordered=True,
    flops=lambda tasks, rows, columns: 40.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.5 * tasks + 2.5) * rows * columns,
)
def della_linear(
    task_vectors: Float[Tensor, "task *shape"], options: DellaLinearOptions, context: Context
) -> Float[Tensor, "*shape"]:
    """DELLA without an election: M = sum_t w_t d_t, d_t being what dropping and rescaling leave of tau_t.

    The keep probability rises with an entry's rank of magnitude along the last axis. The same seed gives the same model.
    """
    weights = weight_each(options.weights, context.experts, context.tensor)
    total = math.fsum(weights) if options.normalise else 1.0
    return weighted_sum(prune_each(task_vectors, options, context), [weight / total for weight in weights])
