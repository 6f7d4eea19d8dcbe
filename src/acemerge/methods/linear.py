"""Linear: the weighted average of the experts' weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.expert_weights import ExpertWeights, check_count, refuse_zero_sum, weight_each
from acemerge.methods.registry import Context, Options, method
from acemerge.numerics.linalg import weighted_sum


@dataclass(frozen=True)
class LinearOptions(Options):
    """Equal weights that sum to one: weight averaging."""

    weights: ExpertWeights = "equal"
    normalise: Annotated[bool, Field(description="divide the weights by their sum; false: a weighted sum of task vectors")] = True

    def check(self, experts: int) -> None:
        """One weight per expert."""
        check_count(self.weights, experts)

    def __post_init__(self) -> None:
        if self.normalise:
            refuse_zero_sum("linear", self.weights, "give other weights, or normalise=false")


@method(
    "linear",
    title="Weighted averaging",
    paper="Wortsman et al., Model soups, ICML 2022",
    touches="all",
    elementwise=True,
    low_rank="both",
    ordered=True,
    takes_base=True,
    float64_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
)
def linear(task_vectors: Float[Tensor, "task *shape"], options: LinearOptions, context: Context) -> Float[Tensor, "*shape"]:
    """The experts' average with weights of your own: M = sum_t w_t tau_t / sum_t w_t, on every floating-point tensor.

    For when you know which expert should count for more. With normalise=false it is task arithmetic with one scale per
    expert, and a negative weight takes an expert's skill away.
    """
    if options.weights == "equal":  # as `average` and `task_arithmetic` do it, in a fraction of the time
        return task_vectors.mean(0) if options.normalise else task_vectors.sum(0)
    weights = weight_each(options.weights, context.experts, context.tensor)
    total = math.fsum(weights) if options.normalise else 1.0
    return weighted_sum(task_vectors, [weight / total for weight in weights])
