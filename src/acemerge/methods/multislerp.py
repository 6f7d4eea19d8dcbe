"""Multi-SLERP: the mean direction of the experts' changes, at their mean length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.expert_weights import ExpertWeights, check_count, refuse_zero_sum, weight_each
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.sphere import Joined, origin_of
from acemerge.numerics.vectors import inner_products, lengths_and_cosines, vectors_of, weighted_vectors

BALANCED = 1e-8  # length of the mean of unit vectors below which it has no direction


@dataclass(frozen=True)
class MultislerpOptions(Options):
    """Equal weights that sum to one."""

    weights: ExpertWeights = "equal"
    normalise: Annotated[bool, Field(description="divide the weights by their sum; false: lengths are summed as weighted")] = True
    of: Joined = "changes"

    def check(self, experts: int) -> None:
        """One weight per expert."""
        check_count(self.weights, experts)

    def __post_init__(self) -> None:
        if self.normalise:
            refuse_zero_sum("multislerp", self.weights, "give other weights, or normalise=false")


@method(
    "multislerp",
    title="Multi-SLERP",
    paper="Goddard, Multi-SLERP, goddard.blog, 2025; from mergekit",
    touches="all",
    ordered=True,
    takes_base=True,
    low_rank=lambda options: "both" if options.of == "changes" else None,
    facts={
        "agreement": "length of the mean of the unit vectors: 1 if all experts point the same way, 0 if they cancel",
        "path": "an arc, or a chord where the experts cancel",
    },
    flops=lambda tasks, rows, columns: (2.0 * tasks + 4.0) * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 2.0 * rows * columns,  # noqa: ARG005
)
def multislerp(task_vectors: Float[Tensor, "task *shape"], options: MultislerpOptions, context: Context) -> Merged:
    """The experts' mean direction at their mean length: M = sum_t w_t |x_t| * m / |m|, m = sum_t w_t x_t / |x_t|.

    x_t is the expert's change, or with of=weights its whole weights. Averaging shortens what does not point the same way; this
    does not. Per tensor, on every floating-point tensor.
    """
    w = torch.tensor(weight_each(options.weights, context.experts, context.tensor), dtype=torch.float64)
    if options.normalise:
        w = w / math.fsum(w.tolist())
    vectors, origin = vectors_of(task_vectors, "tensor"), origin_of(options.of, context)
    lengths, cosines = lengths_and_cosines(inner_products(vectors, origin).cpu())
    coefficients, agreement = at_mean_length(w, lengths[0], cosines[0])
    M = weighted_vectors(vectors, coefficients[None].to(vectors.device), origin)
    facts = {"agreement": agreement, "path": "arc" if agreement >= BALANCED else "chord"}
    return Merged(M.reshape(task_vectors.shape[1:]), facts)


def at_mean_length(
    w: Float[Tensor, " task"], lengths: Float[Tensor, " task"], cosines: Float[Tensor, "task task"]
) -> tuple[Float[Tensor, " task"], float]:
    """What each x_t is multiplied by, and |m|; the plain weights where m vanishes."""
    agreement = math.sqrt(max(0.0, float(w @ cosines @ w)))
    if agreement < BALANCED:
        return w, agreement
    by_length = torch.where(lengths > 0, w / lengths, 0.0)
    return float(w @ lengths) / agreement * by_length, agreement
