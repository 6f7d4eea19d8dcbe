"""Karcher: the point of the sphere that is nearest to all experts' weights, at their mean length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.expert_weights import NonNegativeWeights, check_count, refuse_zero_sum, weight_each
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.sphere import origin_of
from acemerge.numerics.vectors import inner_products, lengths_and_cosines, vectors_of, weighted_vectors


@dataclass(frozen=True)
class KarcherOptions(Options):
    """Iterations and tolerance are mergekit's, whose code is the authors'."""

    weights: NonNegativeWeights = "equal"
    iterations: Annotated[int, Field(ge=0, description="steps towards the mean, at most; 0 is the normalised mean direction")] = (
        10
    )
    tolerance: Annotated[float, Field(gt=0, lt=1, description="length of a step, in radians, below which the mean is found")] = (
        1e-5
    )

    def check(self, experts: int) -> None:
        """One weight per expert."""
        check_count(self.weights, experts)

    def __post_init__(self) -> None:
        refuse_zero_sum("karcher", self.weights)


@method(
    "karcher",
    title="Karcher mean",
    paper="Wang, Ye and Yin, Functionality-Oriented LLM Merging on the Fisher-Rao Manifold, 2026",
    touches="all",
    ordered=True,
    takes_base=True,
    facts={
        "cosine": "between two experts' weights, the smallest of all pairs",
        "steps": "towards the mean, until it lay still",
    },
    flops=lambda tasks, rows, columns: (2.0 * tasks + 4.0) * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 2.0 * rows * columns,  # noqa: ARG005
)
def karcher(task_vectors: Float[Tensor, "task *shape"], options: KarcherOptions, context: Context) -> Merged:
    """The mean of the experts' weights on the sphere, at their mean length: W = sum_t w_t |W_t| * m, for each tensor.

    m is the unit vector with the least sum of w_t theta_t^2, theta_t being its angle to W_t: slerp for any number of experts.
    The base only says what is measured against: it has no part in the result.
    """
    w = torch.tensor(weight_each(options.weights, context.experts, context.tensor), dtype=torch.float64)
    w = w / math.fsum(w.tolist())
    vectors, origin = vectors_of(task_vectors, "tensor"), origin_of("weights", context)
    lengths, cosines = (found[0] for found in lengths_and_cosines(inner_products(vectors, origin).cpu()))
    present = lengths > 0
    steps, coefficients = 0, torch.zeros_like(w)
    if bool((w * present).any()):
        shares = w[present] / w[present].sum()
        m, steps = mean_on_the_sphere(shares, cosines[present][:, present], options.iterations, options.tolerance)
        coefficients[present] = float(w @ lengths) * m / lengths[present]
    M = weighted_vectors(vectors, coefficients[None].to(vectors.device), origin)
    return Merged(M.reshape(task_vectors.shape[1:]), {"cosine": float(cosines.min()), "steps": steps})


def mean_on_the_sphere(
    w: Float[Tensor, " task"], R: Float[Tensor, "task task"], iterations: int, tolerance: float
) -> tuple[Float[Tensor, " task"], int]:
    """The coefficients of unit vectors u_t with cosines R in their Karcher mean, and how many steps it took.

    Vectors are given by their coefficients: |v|^2 = v^T R v and <u_t, v> = (R v)_t.
    """

    def length(v: Tensor) -> float:
        return math.sqrt(max(0.0, float(v @ R @ v)))

    if length(w) < tolerance:  # they cancel: any expert is as good a start
        m = torch.zeros_like(w)
        m[0] = 1
    else:
        m = w / length(w)
    for step in range(iterations):
        d = (R @ m).clamp_(-1, 1)
        theta = d.acos()
        defined = (theta >= tolerance) & (math.pi - theta >= tolerance)  # neither there already nor opposite
        pull = torch.where(defined, w * theta / theta.sin(), 0.0)
        v = pull - (pull @ d) * m  # sum_t w_t log_m(u_t)
        if length(v) < tolerance:
            return m, step
        m = math.cos(length(v)) * m + math.sin(length(v)) / length(v) * v
        m = m / length(m)
    return m, iterations
