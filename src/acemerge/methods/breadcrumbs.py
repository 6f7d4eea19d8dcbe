"""Model Breadcrumbs: remove the largest changes and the small ones, sum the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from acemerge.methods.expert_weights import ExpertWeights, check_count, check_each, each_expert, split_list, weight_each
from acemerge.methods.registry import Alpha, Context, Merged, Options, method
from acemerge.methods.ties import Share
from acemerge.numerics.linalg import row_blocks, weighted_sum
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class BreadcrumbsOptions(Options):
    """Defaults are the official README's."""

    keep: Annotated[
        Share | tuple[Share, ...],
        BeforeValidator(split_list),
        Field(description="share of entries kept, beta: the largest after the outliers; one for all experts, or one each"),
    ] = 0.2
    outliers: Annotated[float, Field(ge=0, lt=1, description="share of largest entries removed, gamma; 0 removes none")] = 0.1
    scope: Annotated[
        Literal["row", "tensor"],
        Field(description="shares of each row along the last axis (official code), or of the whole tensor (paper)"),
    ] = "row"
    weights: ExpertWeights = "equal"
    alpha: Alpha = 0.4

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("keep", self.keep, experts)
        check_count(self.weights, experts)


def breadcrumbs_of(rows: Float[Tensor, "rows n"], removed: int, kept: int) -> Float[Tensor, "rows n"]:
    """Each row without its `removed` largest magnitudes and all that comes after the `kept` next ones; ties by position."""
    masked = torch.zeros_like(rows)
    for block in row_blocks(*rows.shape):
        chosen = rows[block].abs().argsort(dim=1, descending=True, stable=True)[:, removed : removed + kept]
        masked[block].scatter_(1, chosen, rows[block].gather(1, chosen))
    return masked


def nothing_kept(shares: Iterable[float], n: int, where: str = "in the tensor") -> tuple[str, ...]:
    """A warning for each share that is less than one entry."""
    too_small = [share for share in dict.fromkeys(shares) if n and count_of_share(n, share) == 0]
    return tuple(f"keep={share:g} of {n} entries {where} is less than one: it stays at the base" for share in too_small)


@method(
    "breadcrumbs",
    title="Model Breadcrumbs",
    paper="Davari and Belilovsky, Model Breadcrumbs, ECCV 2024",
    touches="all",
    flops=lambda tasks, rows, columns: 30.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 4.5 * rows * columns,  # noqa: ARG005
)
def breadcrumbs(task_vectors: Float[Tensor, "task *shape"], options: BreadcrumbsOptions, context: Context) -> Merged:
    """Remove each task vector's largest entries (outliers) and its small ones, and sum what lies between.

    By default along the last axis, as in the official code; scope=tensor takes the shares of whole tensors, as the paper
    says. Scalars are summed untouched. A row too short to keep anything of stays at the base.
    """
    first, weights = task_vectors[0], weight_each(options.weights, context.experts, context.tensor)
    if first.dim() == 0 or first.numel() == 0:
        return Merged(weighted_sum(task_vectors, weights))
    n = first.shape[-1] if options.scope == "row" else first.numel()
    removed, shares = count_of_share(n, options.outliers), each_expert(options.keep, len(task_vectors))
    M = torch.zeros_like(first)
    for task_vector, weight, share in zip(task_vectors, weights, shares, strict=True):
        crumbs = breadcrumbs_of(task_vector.reshape(-1, n), removed, count_of_share(n, share))
        M.add_(crumbs.reshape(first.shape), alpha=weight)
    where = "along the last axis" if options.scope == "row" else "in the tensor"
    return Merged(M, warnings=nothing_kept(shares, n, where))
