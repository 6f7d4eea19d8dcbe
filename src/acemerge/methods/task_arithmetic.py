"""Task arithmetic: the scaled sum of the task vectors."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from acemerge.methods.expert_weights import ExpertWeights, check_count, weight_each
from acemerge.methods.registry import Alpha, Context, Options, method
from acemerge.numerics.linalg import weighted_sum


@dataclass(frozen=True)
class TaskArithmeticOptions(Options):
    """The scale that most comparisons use where no validation data chooses one."""

    weights: ExpertWeights = "equal"
    alpha: Alpha = 0.3

    def check(self, experts: int) -> None:
        """One weight per expert."""
        check_count(self.weights, experts)


@method(
    "task_arithmetic",
    title="Task Arithmetic",
    paper="Ilharco et al., Editing models with task arithmetic, ICLR 2023",
    touches="all",
    elementwise=True,
    low_rank="both",
)
def task_arithmetic(
    task_vectors: Float[Tensor, "task *shape"], options: TaskArithmeticOptions, context: Context
) -> Float[Tensor, "*shape"]:
    """The sum of the task vectors, scaled: M = sum_t w_t tau_t, W = W0 + alpha M, on every floating-point tensor.

    The scale decides everything; papers tune it on validation data. alpha = 1/T is weight averaging.
    """
    if options.weights == "equal":  # in a fraction of the time
        return task_vectors.sum(0)
    return weighted_sum(task_vectors, weight_each(options.weights, context.experts, context.tensor))
