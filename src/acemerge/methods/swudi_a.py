"""SWUDI-A: WUDI's minimiser along as many directions as the experts' spectrum has, their sum along the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.swudi import FILTERED_DIRECTIONS, filtered_merge, float64_elements, flops

ROUNDING = 1e-10
"""Of the largest eigenvalue, the square of a singular value: what is smaller is rounding of float32 weights."""


@dataclass(frozen=True)
class SwudiAOptions(Options):
    """Only the common scale: the number of directions follows from the spectrum."""


def effective_rank(values: Float[Tensor, " k"]) -> int:
    """K = ceil((sum_i sqrt(l_i))^2 / sum_i l_i): all of k equal eigenvalues, one if one outweighs the others."""
    ratio = float(values.sqrt().sum().square() / values.sum())
    return math.ceil(ratio * (1 - 1e-12))  # rounding must not add a direction to a flat spectrum


def leading_inverse(values: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """1 / l of the K largest, 0 of the others."""
    clear = values[values > ROUNDING * values[-1:]]
    K = effective_rank(clear) if len(clear) else 0
    g = torch.zeros_like(values)
    g[len(g) - K :] = 1 / values[len(g) - K :]
    return g


@method(
    "swudi_a",
    title="SWUDI-A-Merging",
    paper="SWUDI, arXiv 2606.07289, 2026",
    closed_form=True,
    low_rank="both",
    facts=FILTERED_DIRECTIONS,
    flops=flops,
    float64_elements=float64_elements,
)
def swudi_a(task_vectors: Float[Tensor, "task out in"], options: SwudiAOptions, context: Context) -> Merged:  # noqa: ARG001
    """SWUDI with nothing to tune: as many directions are corrected as the experts' spectrum has.

    With eigenvalues l of sum_t G_t / |tau_t|^2, M is WUDI's minimiser along K = ceil((sum sqrt l)^2 / sum l) directions, and the
    sum of the experts along the others. One expert comes back unchanged.
    """
    return filtered_merge(task_vectors, context, leading_inverse)
