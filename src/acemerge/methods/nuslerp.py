"""NuSLERP: two experts' changes joined along an arc, whole or row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.expert_weights import ExpertWeights, check_count, refuse_zero_sum, weight_each
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.sphere import Joined, origin_of
from acemerge.numerics.vectors import inner_products, lengths_and_cosines, tensor_of, vectors_of, weighted_vectors

PARALLEL = 1 - 1e-12  # |cos| beyond which the arc is a chord, within 1e-12 of it, and sin(theta) too small to divide by


@dataclass(frozen=True)
class NuslerpOptions(Options):
    """Half way between the two changes by default."""

    weights: ExpertWeights = "equal"
    of: Joined = "changes"
    scope: Annotated[
        Literal["tensor", "row", "column"],
        Field(description="one arc for the whole tensor, or one for each vector along its last axis (row) or its first (column)"),
    ] = "tensor"

    def check(self, experts: int) -> None:
        """One weight per expert."""
        check_count(self.weights, experts)

    def __post_init__(self) -> None:
        refuse_zero_sum("nuslerp", self.weights)


@method(
    "nuslerp",
    title="NuSLERP",
    paper="Goddard et al., Arcee's MergeKit, EMNLP 2024, where it comes from",
    touches="all",
    experts=2,
    ordered=True,
    takes_base=True,
    facts={"cosine": "between what is joined of the two experts; the mean, where there are several arcs"},
    flops=lambda tasks, rows, columns: 8.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 2.0 * rows * columns,  # noqa: ARG005
)
def nuslerp(task_vectors: Float[Tensor, "task *shape"], options: NuslerpOptions, context: Context) -> Merged:
    """Two experts' changes, joined along the arc between them: M = c_1 tau_1 + c_2 tau_2, on every floating-point tensor.

    c_1 = sin((1 - t) theta) / sin(theta) and c_2 = sin(t theta) / sin(theta), theta being the angle between the two and t the
    second one's share of the weights. With of=weights it is the experts' whole weights that are joined, as slerp does it.
    """
    if len(task_vectors) != 2:
        experts = ", ".join(context.experts)
        raise InputError(f"tensor '{context.tensor}': nuslerp joins exactly 2 experts, not {len(task_vectors)} ({experts})")
    weights = weight_each(options.weights, context.experts, context.tensor)
    vectors, origin = vectors_of(task_vectors, options.scope), origin_of(options.of, context, options.scope)
    _, cosines = lengths_and_cosines(inner_products(vectors, origin))
    coefficients = on_the_arc(cosines[:, 0, 1], weights[1] / math.fsum(weights))
    M = weighted_vectors(vectors, coefficients, origin)
    facts = {"cosine": float(cosines[:, 0, 1].mean())} if len(cosines) else {}
    return Merged(tensor_of(M, task_vectors.shape[1:], options.scope), facts)


def on_the_arc(cosine: Float[Tensor, " m"], t: float) -> Float[Tensor, "m 2"]:
    """What the two are multiplied by: on the arc, or on the chord where they are parallel."""
    chord = cosine.abs() > PARALLEL
    theta = torch.where(chord, math.pi / 2, cosine.acos())
    shares = torch.tensor([1 - t, t], dtype=cosine.dtype, device=cosine.device)
    arc = (shares * theta[:, None]).sin() / theta.sin()[:, None]
    return torch.where(chord[:, None], shares, arc)
