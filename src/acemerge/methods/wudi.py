"""WUDI-Merging: the merge whose difference from each expert is invisible to that expert's task vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.actmat import KEPT_DIRECTIONS, Cut, closed_form_elements, closed_form_flops, relative_cut
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.covariance import Experts
from acemerge.numerics.linalg import sum_of_squares, weighted_sum


@dataclass(frozen=True)
class WudiOptions(Options):
    """Defaults are the authors' for vision models; their RoBERTa runs use lr = 2e-5."""

    mode: Annotated[
        Literal["iterative", "closed_form"],
        Field(description="the published optimiser, stopped early, or the exact minimiser of its loss"),
    ] = "iterative"
    steps: Annotated[int, Field(ge=0, description="iterative: Adam steps")] = 300
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="iterative: Adam's learning rate")] = 1e-5
    rtol: Cut = "float32"


def _flops(tasks: int, rows: int, columns: int) -> float:
    """The default, 300 gradients, outweighs the closed form."""
    side = min(columns, 2 * tasks * rows)
    return closed_form_flops(tasks, rows, columns) + 300 * rows * columns * (2.0 * side + 12)


@method(
    "wudi",
    title="WUDI-Merging",
    paper="Cheng et al., Whoever started the interference should end it, ICML 2025",
    closed_form=True,
    rest="keep",
    # Adam divides entry by entry: its steps depend on the coordinates, and leave the span of the experts.
    low_rank=lambda options: "both" if options.mode == "closed_form" else None,
    facts=KEPT_DIRECTIONS,
    flops=_flops,
    float64_elements=lambda tasks, rows, columns: closed_form_elements(tasks, rows, columns) + 2.0 * rows * columns,
)
def wudi(task_vectors: Float[Tensor, "task out in"], options: WudiOptions, context: Context) -> Merged:
    """Minimise the interference sum_t |(M - tau_t) tau_t^T|^2 / |tau_t|^2, without data.

    As published: 300 Adam steps from the sum of the task vectors, far from convergence. mode=closed_form gives the minimiser.
    Tensors that are not matrices stay at the base.
    """
    energies = [sum_of_squares(task_vector) for task_vector in task_vectors]
    changed = [t for t, energy in enumerate(energies) if energy > 0]
    if not changed:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64), {"active_experts": 0})
    frame = context.frame_of(task_vectors)
    experts = Experts(task_vectors, changed, frame, centre=False)
    weights = [1 / energies[t] for t in changed]
    if options.mode == "closed_form":
        M, kept = experts.least_squares(weights, relative_cut(options.rtol, frame.shape[1]))
        return Merged(M, {"active_experts": len(changed), "kept_directions": kept})
    start = weighted_sum(task_vectors, [1.0] * len(task_vectors))
    return Merged(descend(experts, weights, start, options), {"active_experts": len(changed)})


def descend(
    experts: Experts, weights: Sequence[float], M: Float[Tensor, "out in"], options: WudiOptions
) -> Float[Tensor, "out in"]:
    """Adam from M, in place. The T terms of the gradient are one: 2 (M S - N), S = sum_t w_t G_t, N = sum_t w_t tau_t G_t."""
    if len(weights) == 1:
        return M  # the minimum already; Adam, which divides by the gradient's size, would follow the rounding of a zero one
    S, N = experts.weighted_covariance(weights)
    first, second = torch.zeros_like(M), torch.zeros_like(M)
    beta1, beta2, tiny = 0.9, 0.999, 1e-8
    for step in range(1, options.steps + 1):
        gradient = S.times(M).sub_(N).mul_(2)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = torch.div(second, 1 - beta2**step, out=gradient).sqrt_().add_(tiny)
        M.addcdiv_(first, spread, value=-options.lr / (1 - beta1**step))
    return M
