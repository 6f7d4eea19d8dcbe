"""RAM: changes that only one expert made are kept whole, shared ones averaged over those who made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Options, method

Epsilon = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="an entry that changed by no more than this counts as unchanged")
]


@dataclass(frozen=True)
class RamOptions(Options):
    """The threshold is mergekit's."""

    epsilon: Epsilon = 1e-5


def who_changed(
    task_vectors: Float[Tensor, "task *shape"], epsilon: float
) -> tuple[Bool[Tensor, "task *shape"], Int[Tensor, "*shape"]]:
    """Which experts changed an entry, and how many."""
    changed = task_vectors.abs() > epsilon
    return changed, changed.sum(0)


@method(
    "ram",
    title="Reinforced Agent Merging",
    paper="Yuan et al., Behavior Knowledge Merge in Reinforced Agentic Models, 2026",
    touches="all",
    elementwise=True,
    flops=lambda tasks, rows, columns: 6.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.7 * tasks + 1.5) * rows * columns,
)
def ram(task_vectors: Float[Tensor, "task *shape"], options: RamOptions) -> Float[Tensor, "*shape"]:
    """The mean change, by entry, over the experts that changed it: M = sum of tau_t / their number, where |tau_t| > epsilon.

    What one expert alone changed stays whole, what several changed is averaged. For experts whose changes are sparse, as those
    of reinforcement learning are; of dense ones it is weight averaging.
    """
    changed, count = who_changed(task_vectors, options.epsilon)
    return (task_vectors * changed).sum(0) / count.clamp(min=1)
