"""Iso-CTS: a common subspace, directions of each task's own, and one singular value for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.tsv_m import WEAKEST_DIRECTION, orthogonalise, orthogonalised_elements, orthogonalised_flops
from acemerge.numerics.linalg import (
    LeadingDirections,
    changed_tasks,
    directions_elements,
    directions_flops,
    leading_directions,
    sum_of_squares,
    weighted_sum,
)
from acemerge.numerics.threads import AT_ONCE, share
from acemerge.numerics.thresholds import count_of_share

ROUNDING = 4e-7
"""Share of a task vector's length below which what is left of it is rounding of float32 weights."""


@dataclass(frozen=True)
class IsoCtsOptions(Options):
    """Defaults are the authors'."""

    common: Annotated[float, Field(ge=0.5, le=1, description="f, the share of directions taken from the experts' sum")] = 0.8


@method(
    "iso_cts",
    title="Iso-CTS",
    paper="Marczak et al., No task left behind: isotropic model merging, ICML 2025",
    low_rank="both",
    facts={
        "common_directions": "leading singular directions of the experts' sum",
        "directions_each": "further directions taken from each expert",
        **WEAKEST_DIRECTION,
    },
    flops=lambda tasks, rows, columns: (
        (tasks + 1) * directions_flops(rows, columns, round(0.8 * min(rows, columns))) + orthogonalised_flops(rows, columns)
    ),
    float64_elements=lambda tasks, rows, columns: max(
        min(tasks, AT_ONCE) * (3.0 * rows * columns + directions_elements(rows, columns, min(rows, columns)))
        + directions_elements(rows, columns, min(rows, columns)),
        orthogonalised_elements(rows, columns),
    ),
)
def iso_cts(task_vectors: Float[Tensor, "task out in"], options: IsoCtsOptions, context: Context) -> Merged:
    """Iso-C with part of its directions given back to the single experts.

    The leading directions of the sum, and of each expert's remainder outside their column space, are orthogonalised and all
    get the mean of their singular values. Not symmetric in rows and columns. f = 1, or one expert, is Iso-C.
    """
    changed, r = changed_tasks(task_vectors), min(context.frame_of(task_vectors).shape)
    if not changed:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64))
    each = round((r - count_of_share(r, options.common)) / len(changed))  # halves to even, as in the release
    common = leading_directions(weighted_sum(task_vectors, [1.0] * len(task_vectors)), r - each * len(changed))
    own = share(lambda t: own_directions(task_vectors[t], common, each), changed, AT_ONCE)
    wanted, found = r, len(common.values) + sum(len(task.values) for task in own)
    if not found:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64))
    together = orthogonalise([*own, common])
    mean = float(together.values.sum()) / wanted  # of all r values, zeros included
    facts = {"active_experts": len(changed), "common_directions": len(common.values), "directions_each": each, **together.facts}
    missing = f"the experts have only {found} of the {wanted} directions asked for: the others stay at the base"
    warnings = (missing, *together.warnings) if found < wanted else together.warnings
    return Merged((together.left * mean) @ together.right.T, facts, warnings=warnings)


def own_directions(task_vector: Float[Tensor, "out in"], common: LeadingDirections, k: int) -> LeadingDirections:
    """The k leading triples of R_t = tau_t - U_c U_c^T tau_t, without those that are rounding of tau_t."""
    task_vector = task_vector.double()
    found = leading_directions(task_vector - common.left @ (common.left.T @ task_vector), k)
    clear = found.values > ROUNDING * math.sqrt(sum_of_squares(task_vector))
    return LeadingDirections(found.values[clear], found.left[:, clear], found.right[:, clear])
