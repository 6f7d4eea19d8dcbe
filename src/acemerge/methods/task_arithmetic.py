"""Task arithmetic: the scaled sum of the task vectors."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from acemerge.methods.registry import Alpha, Options, method


@dataclass(frozen=True)
class TaskArithmeticOptions(Options):
    """The scale that most comparisons use where no validation data chooses one."""

    alpha: Alpha = 0.3


@method(
    "task_arithmetic",
    title="Task Arithmetic",
    paper="Ilharco et al., Editing models with task arithmetic, ICLR 2023",
    touches="all",
    elementwise=True,
    low_rank="both",
)
def task_arithmetic(
    task_vectors: Float[Tensor, "task *shape"],
    options: TaskArithmeticOptions,  # noqa: ARG001
) -> Float[Tensor, "*shape"]:
    """The sum of the task vectors, scaled: M = sum_t tau_t, W = W0 + alpha M, on every floating-point tensor.

    The scale decides everything; papers tune it on validation data. alpha = 1/T is weight averaging.
    """
    return task_vectors.sum(0)
