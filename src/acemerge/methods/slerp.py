"""SLERP: two experts' weights joined along an arc instead of a chord."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import row_blocks, weighted_sum

PARALLEL = 1 - 1e-6  # |cos| beyond which the arc is a chord, within 1e-6 of it, and sin(theta) too small to divide by


@dataclass(frozen=True)
class SlerpOptions(Options):
    """Half way by default."""

    t: Annotated[float, Field(ge=0, le=1, description="0 is the first expert, 1 the second, 0.5 half way")] = 0.5


@method(
    "slerp",
    title="Spherical interpolation",
    paper="Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985",
    touches="all",
    experts=2,
    ordered=True,
    takes_base=True,
    facts={"cosine": "between the two experts", "path": "an arc, or a chord where they are parallel"},
    flops=lambda tasks, rows, columns: 6.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 2.0 * rows * columns,  # noqa: ARG005
)
def slerp(task_vectors: Float[Tensor, "task *shape"], options: SlerpOptions, context: Context) -> Merged:
    """Two experts' weights, interpolated along the arc between them: W = c_1 W_1 + c_2 W_2, on every floating-point tensor.

    c_1 = sin((1 - t) theta) / sin(theta) and c_2 = sin(t theta) / sin(theta), theta being the angle between the flattened
    W_1 and W_2; linear interpolation where they are nearly parallel or one of them is zero. It keeps the length of weights
    that averaging would shorten. The base only says what is measured against: it has no part in the result.
    """
    if len(task_vectors) != 2:
        experts = ", ".join(context.experts)
        raise InputError(f"tensor '{context.tensor}': slerp joins exactly 2 experts, not {len(task_vectors)} ({experts})")
    cosine = cosine_between(task_vectors, context.base)
    first, second = coefficients(cosine, options.t)
    # W - W0 with W_t = W0 + tau_t; without a base W0 is taken for zero.
    M = weighted_sum(task_vectors, (first, second))
    if context.base is not None:
        M.add_(context.base.to(M.device), alpha=first + second - 1)
    return Merged(M, {"cosine": cosine, "path": "chord" if abs(cosine) > PARALLEL else "arc"})


def coefficients(cosine: float, t: float) -> tuple[float, float]:
    """What W_1 and W_2 are multiplied by."""
    if abs(cosine) > PARALLEL:
        return 1 - t, t
    theta = math.acos(cosine)
    return math.sin((1 - t) * theta) / math.sin(theta), math.sin(t * theta) / math.sin(theta)


def cosine_between(task_vectors: Float[Tensor, "2 *shape"], base: Float[Tensor, "*shape"] | None) -> float:
    """<W_1, W_2> / (|W_1| |W_2|) in float64, a block at a time; 1 if either is zero, as a direction it does not have."""
    first, second = (task_vector.reshape(-1) for task_vector in task_vectors)
    origin = None if base is None else base.reshape(-1)
    products = [0.0, 0.0, 0.0]
    for block in row_blocks(first.numel(), 1):
        W_1, W_2 = first[block].double(), second[block].double()
        if origin is not None:
            W_0 = origin[block].to(W_1)
            W_1, W_2 = W_1 + W_0, W_2 + W_0
        for i, (a, b) in enumerate(((W_1, W_2), (W_1, W_1), (W_2, W_2))):
            products[i] += float(a @ b)
    lengths = math.sqrt(products[1]) * math.sqrt(products[2])
    return products[0] / lengths if lengths > 0 else 1.0
