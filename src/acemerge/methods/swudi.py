"""SWUDI: WUDI's loss descended for a fixed time, along its strongest directions only, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.actmat import closed_form_elements, closed_form_flops
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.covariance import Experts
from acemerge.numerics.linalg import Gains, sum_of_squares, weighted_sum

FILTERED_DIRECTIONS = {"filtered_directions": "input directions along which the sum of the experts is corrected"}


@dataclass(frozen=True)
class SwudiOptions(Options):
    """Defaults are the authors' for CLIP ViT-B/32; for language models they keep 0.85 and choose alpha, 0.1 or 0.2, by hand."""

    steps: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="how long the loss is descended; 0: the sum of the experts")
    ] = 300.0
    keep: Annotated[float, Field(gt=0, le=1, description="share of the input directions, the strongest, that are corrected")] = (
        0.65
    )


def filtered_merge(task_vectors: Float[Tensor, "task out in"], context: Context, gains: Gains) -> Merged:
    """M = theta_0 + (B - theta_0 C) g(C), theta_0 = sum_t tau_t; C = sum_t w_t G_t, B = sum_t w_t tau_t G_t, w_t = 1/|tau_t|^2.

    With g(l) = f / l that is theta_0 (I - V diag(f) V^T) + B V diag(f / l) V^T for C = V diag(l) V^T.
    """
    energies = [sum_of_squares(task_vector) for task_vector in task_vectors]
    changed = [t for t, energy in enumerate(energies) if energy > 0]
    start = weighted_sum(task_vectors, [1.0] * len(task_vectors))
    if not changed:
        return Merged(start, {"active_experts": 0})
    experts = Experts(task_vectors, changed, context.frame_of(task_vectors), centre=False)
    M, used = experts.least_squares_from(start, [1 / energies[t] for t in changed], gains)
    return Merged(M, {"active_experts": len(changed), "filtered_directions": used})


def flops(tasks: int, rows: int, columns: int) -> float:
    """The closed form's, and two products with the start."""
    return closed_form_flops(tasks, rows, columns) + 2.0 * rows * columns * (tasks + min(columns, tasks * rows))


def float64_elements(tasks: int, rows: int, columns: int) -> float:
    """The closed form's, and the start."""
    return closed_form_elements(tasks, rows, columns) + 1.0 * rows * columns


@method(
    "swudi",
    title="SWUDI-Merging",
    paper="SWUDI, arXiv 2606.07289, 2026",
    closed_form=True,
    low_rank="both",
    facts=FILTERED_DIRECTIONS,
    flops=flops,
    float64_elements=float64_elements,
)
def swudi(task_vectors: Float[Tensor, "task out in"], options: SwudiOptions, context: Context) -> Merged:
    """The sum of the experts with less of WUDI's interference, where that is strong; no optimiser.

    Along an eigenvector of sum_t G_t / |tau_t|^2 with eigenvalue l, M goes the share 1 - exp(-l steps) of the way from the sum to
    the minimum; along the weakest directions it stays at the sum. One expert comes back unchanged.
    """
    kept = math.ceil(context.frame_of(task_vectors).shape[1] * options.keep * (1 - 2**-51))

    def gains(values: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """(1 - exp(-l steps)) / l, which is steps at l = 0, of the `kept` largest."""
        g = torch.where(values > 0, -torch.expm1(-values * options.steps) / values, options.steps)
        g[: max(0, len(g) - kept)] = 0
        return g

    return filtered_merge(task_vectors, context, gains)
