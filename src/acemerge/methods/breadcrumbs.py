"""Model Breadcrumbs: remove the largest changes and the small ones, sum the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Alpha, Merged, Options, method
from acemerge.numerics.linalg import row_blocks
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class BreadcrumbsOptions(Options):
    """Defaults are the official README's."""

    keep: Annotated[float, Field(gt=0, le=1, description="share of entries kept, beta: the largest after the outliers")] = 0.2
    outliers: Annotated[float, Field(ge=0, lt=1, description="share of largest entries removed, gamma; 0 removes none")] = 0.1
    scope: Annotated[
        Literal["row", "tensor"],
        Field(description="shares of each row along the last axis (official code), or of the whole tensor (paper)"),
    ] = "row"
    alpha: Alpha = 0.4


def breadcrumbs_of(rows: Float[Tensor, "rows n"], removed: int, kept: int) -> Float[Tensor, "rows n"]:
    """Each row without its `removed` largest magnitudes and all that comes after the `kept` next ones; ties by position."""
    masked = torch.zeros_like(rows)
    for block in row_blocks(*rows.shape):
        chosen = rows[block].abs().argsort(dim=1, descending=True, stable=True)[:, removed : removed + kept]
        masked[block].scatter_(1, chosen, rows[block].gather(1, chosen))
    return masked


@method(
    "breadcrumbs",
    title="Model Breadcrumbs",
    paper="Davari and Belilovsky, Model Breadcrumbs, ECCV 2024",
    touches="all",
    flops=lambda tasks, rows, columns: 30.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 4.5 * rows * columns,  # noqa: ARG005
)
def breadcrumbs(task_vectors: Float[Tensor, "task *shape"], options: BreadcrumbsOptions) -> Merged:
    """Remove each task vector's largest entries (outliers) and its small ones, and sum what lies between.

    By default along the last axis, as in the official code; scope=tensor takes the shares of whole tensors, as the paper
    says. Scalars are summed untouched. A row too short to keep anything of stays at the base.
    """
    first = task_vectors[0]
    if first.dim() == 0 or first.numel() == 0:
        return Merged(task_vectors.sum(0))
    n = first.shape[-1] if options.scope == "row" else first.numel()
    removed, kept = count_of_share(n, options.outliers), count_of_share(n, options.keep)
    M = torch.zeros_like(first)
    for task_vector in task_vectors:
        M += breadcrumbs_of(task_vector.reshape(-1, n), removed, kept).reshape(first.shape)
    if kept > 0:
        return Merged(M)
    where = "along the last axis" if options.scope == "row" else "in the tensor"
    warning = f"keep={options.keep:g} of {n} entries {where} is less than one: it stays at the base"
    return Merged(M, warnings=(warning,))
