"""Iso-C: the sum of the task vectors with all its singular values made equal."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import directions_elements, directions_flops, leading_directions, weighted_sum


@dataclass(frozen=True)
class IsoCOptions(Options):
    """Only the common scale, 1 where no validation data chooses one."""


@method(
    "iso_c",
    title="Iso-C",
    paper="Marczak et al., No task left behind: isotropic model merging, ICML 2025",
    low_rank="both",
    facts={"rank": "of the experts' sum", "singular_value": "the one that all directions get"},
    flops=lambda tasks, rows, columns: (
        directions_flops(rows, columns, min(rows, columns)) + 2.0 * (min(rows, columns) + tasks) * rows * columns
    ),
    float64_elements=lambda tasks, rows, columns: (  # noqa: ARG005
        3.0 * rows * columns + directions_elements(rows, columns, min(rows, columns))
    ),
)
def iso_c(task_vectors: Float[Tensor, "task out in"], options: IsoCOptions, context: Context) -> Merged:  # noqa: ARG001
    """The sum of the experts with a flat spectrum: every singular direction counts the same.

    sum_t tau_t = U diag(s) V^T, M = mean(s) U V^T. Directions that the sum does not have (LoRA experts) get no weight. Authors
    tune alpha on validation data, usually to 1.3-1.5. One expert does not come back unchanged: its spectrum is flattened too.
    """
    total = weighted_sum(task_vectors, [1.0] * len(task_vectors))
    r = min(context.frame_of(task_vectors).shape)
    directions = leading_directions(total, r)
    rank = len(directions.values)
    mean = float(directions.values.sum()) / r  # of all r values, zeros included
    missing = f"the sum of the experts has rank {rank} of {r}: only these directions are made equal, the others get nothing"
    M = (directions.left * mean) @ directions.right.T
    return Merged(M, {"rank": rank, "singular_value": mean}, warnings=(missing,) if 0 < rank < r else ())
