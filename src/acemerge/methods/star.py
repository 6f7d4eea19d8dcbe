"""STAR: the average of experts whose weak singular directions are cut off and whose strong ones make up for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Merged, Options, method
from acemerge.numerics.linalg import (
    LeadingDirections,
    changed_tasks,
    directions_elements,
    directions_flops,
    leading_count,
    leading_directions,
)
from acemerge.numerics.threads import AT_ONCE, share


@dataclass(frozen=True)
class StarOptions(Options):
    """The default is the authors', for all models and numbers of experts."""

    keep: Annotated[
        float, Field(gt=0, le=1, description="eta: share of an expert's singular values, by their sum, that is kept")
    ] = 0.4


def truncated(tau: Float[Tensor, "out in"], keep: float) -> LeadingDirections:
    """The fewest leading directions with this share of the nuclear norm, scaled back to all of it."""
    found = leading_directions(tau, min(tau.shape))
    k = leading_count(found.values, keep)
    U, s, V = found.left[:, -k:], found.values[-k:], found.right[:, -k:]
    return LeadingDirections(s * (found.values.sum() / s.sum()), U, V)


@method(
    "star",
    title="STAR, spectral truncation and rescale",
    paper="Lee et al., STAR: spectral truncation and rescale for model merging, NAACL 2025",
    low_rank="both",
    facts={"fewest_directions": "kept of any expert", "most_directions": "kept of any expert"},
    flops=lambda tasks, rows, columns: tasks * directions_flops(rows, columns, min(rows, columns)),
    float64_elements=lambda tasks, rows, columns: (
        2.0 * rows * columns
        + min(tasks, AT_ONCE) * (rows * columns + directions_elements(rows, columns, min(rows, columns)))
        + tasks * (rows + columns) * 0.2 * min(rows, columns)
    ),
)
def star(task_vectors: Float[Tensor, "task out in"], options: StarOptions) -> Merged:
    """The average of the experts' leading singular directions, which make up for the others.

    The fewest directions that have the share `keep` of the nuclear norm |tau_t|_* are kept and scaled back to |tau_t|_*. With
    keep = 1 it is weight averaging.
    """
    changed = changed_tasks(task_vectors)
    M = torch.zeros_like(task_vectors[0], dtype=torch.float64)
    experts = share(lambda t: truncated(task_vectors[t].double(), options.keep), changed, AT_ONCE)
    for own in experts:
        M.addmm_(own.left * own.values, own.right.T, alpha=1 / len(task_vectors))
    kept = [len(own.values) for own in experts]
    return Merged(
        M, {"active_experts": len(kept), "fewest_directions": min(kept, default=0), "most_directions": max(kept, default=0)}
    )
