"""ACTMat: the least-squares merge under each expert's own task vector as its input covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.covariance import Experts
from acemerge.numerics.linalg import changed_tasks

Cut = Annotated[
    Annotated[float, Field(gt=0, lt=1)] | Literal["float32"],
    Field(description="eigenvalues of the system up to this share of the largest are left out; 'float32': in * 2^-23"),
]


def relative_cut(rtol: float | Literal["float32"], columns: int) -> float:
    """What a pseudo-inverse in float32 leaves out, as a number that does not depend on the precision used here."""
    return columns * 2.0**-23 if rtol == "float32" else rtol


@dataclass(frozen=True)
class ActmatOptions(Options):
    """The cut-off is the only choice; the release makes it by working in float32."""

    rtol: Cut = "float32"


def closed_form_flops(tasks: int, rows: int, columns: int) -> float:
    """Covariances and products on their smaller side, an eigendecomposition and two products with its vectors."""
    m, n, side = rows, columns, min(columns, tasks * rows)
    return tasks * m * n * (side + 3.0 * min(m, n)) + 9.0 * side**3 + 4.0 * m * side * n


def closed_form_elements(tasks: int, rows: int, columns: int) -> float:
    """float64 numbers held: the system, its eigenvectors twice, the right-hand side, two products with it, a block of rows."""
    m, n, side = rows, columns, min(columns, tasks * rows)
    stack = tasks * m * n if tasks * m < n else 0
    return 3.0 * side * side + stack + 3.0 * m * n + min(m * n, 2**20)


KEPT_DIRECTIONS = {"kept_directions": "directions of the system that the pseudo-inverse keeps"}


@method(
    "actmat",
    title="ACTMat",
    paper="ACTMat, arXiv 2604.01329, 2026",
    closed_form=True,
    low_rank="both",
    facts=KEPT_DIRECTIONS,
    flops=closed_form_flops,
    float64_elements=closed_form_elements,
)
def actmat(task_vectors: Float[Tensor, "task out in"], options: ActmatOptions, context: Context) -> Merged:
    """The optimal merge if each expert's inputs vary as its task vector does: M = (sum_t tau_t G_t)(sum_t G_t)^+.

    G_t = tau_t^T tau_t: ACE's closed form without centring, normalisation, ridge, prior or refinement. Experts with long task
    vectors dominate. The cut-off of the pseudo-inverse matters: directions that hardly any expert uses are amplified without it.
    """
    changed = changed_tasks(task_vectors)
    if not changed:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64), {"active_experts": 0})
    frame = context.frame_of(task_vectors)
    experts = Experts(task_vectors, changed, frame, centre=False)
    M, kept = experts.least_squares([1.0] * len(changed), relative_cut(options.rtol, frame.shape[1]))
    return Merged(M, {"active_experts": len(changed), "kept_directions": kept})
