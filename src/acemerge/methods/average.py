"""Weight averaging: the mean of the experts' weights."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from acemerge.methods.registry import Options, method


@dataclass(frozen=True)
class AverageOptions(Options):
    """Only the common scale."""


@method(
    "average",
    title="Weight averaging",
    paper="Wortsman et al., Model soups, ICML 2022",
    touches="all",
    elementwise=True,
    low_rank="both",
)
def average(task_vectors: Float[Tensor, "task *shape"], options: AverageOptions) -> Float[Tensor, "*shape"]:  # noqa: ARG001
    """The mean of the experts: M = mean_t (W_t - W0), on every floating-point tensor but the task heads.

    The baseline every other method has to beat.
    """
    return task_vectors.mean(0)
