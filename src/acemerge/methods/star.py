"""STAR: the average of experts whose weak singular directions are cut off and whose strong ones make up for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Merged, Options, method
from acemerge.numerics.linalg import directions_elements, directions_flops, leading_count, leading_directions


@dataclass(frozen=True)
class StarOptions(Options):
    """The default is the authors', for all models and numbers of experts."""

    keep: Annotated[
        float, Field(gt=0, le=1, description="eta: share of an expert's singular values, by their sum, that is kept")
    ] = 0.4


@method(
    "star",
    title="STAR, spectral truncation and rescale",
    paper="Lee et al., STAR: spectral truncation and rescale for model merging, NAACL 2025",
    low_rank="both",
    facts={"fewest_directions": "kept of any expert", "most_directions": "kept of any expert"},
    flops=lambda tasks, rows, columns: tasks * directions_flops(rows, columns, min(rows, columns)),
    float64_elements=lambda tasks, rows, columns: (  # noqa: ARG005
        3.0 * rows * columns + directions_elements(rows, columns, min(rows, columns))
    ),
)
def star(task_vectors: Float[Tensor, "task out in"], options: StarOptions) -> Merged:
    """The average of the experts' leading singular directions, which make up for the others.

    The fewest directions that have the share `keep` of the nuclear norm |tau_t|_* are kept and scaled back to |tau_t|_*. With
    keep = 1 it is weight averaging.
    """
    M = torch.zeros_like(task_vectors[0], dtype=torch.float64)
    kept = []
    for task_vector in task_vectors:
        own = leading_directions(task_vector.double(), min(task_vector.shape))
        if not len(own.values):
            continue
        k = leading_count(own.values, options.keep)
        U, s, V = own.left[:, -k:], own.values[-k:], own.right[:, -k:]
        M.addmm_(U * s, V.T, alpha=float(own.values.sum() / s.sum()) / len(task_vectors))
        kept.append(k)
    return Merged(
        M, {"active_experts": len(kept), "fewest_directions": min(kept, default=0), "most_directions": max(kept, default=0)}
    )
