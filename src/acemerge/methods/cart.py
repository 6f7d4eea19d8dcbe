"""CART: the average of the experts plus what makes each of them differ from it, reduced to low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import directions_elements, directions_flops, leading_directions, weighted_sum
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class CartOptions(Options):
    """Defaults are the authors' for 8 tasks (ViT-B/32)."""

    scale: Annotated[float, Field(ge=0, allow_inf_nan=False, description="lambda, the weight of the low-rank residuals")] = 2.0
    rank: Annotated[
        float, Field(ge=0, le=1, description="rho: singular directions kept of each residual, as a share of min(out, in)")
    ] = 0.12


@method(
    "cart",
    title="CART",
    paper="Choi et al., Revisiting weight averaging for model merging, 2024",
    low_rank="both",
    facts={"residual_rank": "singular directions kept of each expert's distance from the mean"},
    flops=lambda tasks, rows, columns: tasks * directions_flops(rows, columns, round(0.12 * min(rows, columns))),
    float64_elements=lambda tasks, rows, columns: (  # noqa: ARG005
        4.0 * rows * columns + directions_elements(rows, columns, round(0.12 * min(rows, columns)))
    ),
)
def cart(task_vectors: Float[Tensor, "task out in"], options: CartOptions, context: Context) -> Merged:
    """The average, plus a low-rank part of every expert's distance from it.

    A = mean_t tau_t; M = A + lambda sum_t SVD_k(tau_t - A), k = max(1, floor(rho min(out, in))). For three experts or more:
    with two, the residuals are opposite and cancel, and CART is weight averaging whatever its options.
    """
    tasks = len(task_vectors)
    average = weighted_sum(task_vectors, [1 / tasks] * tasks)
    k = max(1, count_of_share(min(context.frame_of(task_vectors).shape), options.rank)) if options.rank else 0
    M = average.clone()
    for task_vector in task_vectors:
        residual = leading_directions(task_vector - average, k)
        M.addmm_(residual.left * residual.values, residual.right.T, alpha=options.scale)
    return Merged(M, {"residual_rank": k})
