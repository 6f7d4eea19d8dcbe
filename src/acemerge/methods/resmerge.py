"""ResMerge: what experts have beside their leading singular direction, agreed upon, and a little of the leading ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import (
    LeadingDirections,
    changed_tasks,
    directions_elements,
    directions_flops,
    leading_directions,
    weighted_sum,
)
from acemerge.numerics.threads import AT_ONCE, share
from acemerge.numerics.vectors import inner_products, lengths_and_cosines, vectors_of

ROUNDING = 1e-6
"""Of a task vector's length: a residual, or a mean of heads, that is shorter is rounding of float32 weights."""


@dataclass(frozen=True)
class ResMergeOptions(Options):
    """Defaults are the authors'."""

    directions: Annotated[int, Field(ge=1, description="K: leading singular directions of an expert that are its head")] = 1
    head_share: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="rho: length of the heads' part, in lengths of the residuals'")
    ] = 0.2
    trust: Annotated[
        float, Field(ge=0, le=1, description="how much less the merge shrinks by disagreement if experts agree fully")
    ] = 0.3


@dataclass(frozen=True)
class Split:
    """tau_t = H_t + R_t, the heads as singular triples; inner products of all heads and of all residuals."""

    heads: list[LeadingDirections]
    HH: Float[Tensor, "task task"]
    RR: Float[Tensor, "task task"]


def split(task_vectors: Float[Tensor, "task out in"], directions: int) -> Split:
    """By inner products alone: <R_s, R_t> = <tau_s, tau_t> - <tau_s, H_t> - <H_s, tau_t> + <H_s, H_t>; no residual is formed."""
    heads = share(lambda tau: leading_directions(tau.double(), directions), task_vectors, AT_ONCE)
    inner = [[_inner(tau, head) for head in heads] for tau in task_vectors]
    TH = torch.tensor(inner, dtype=torch.float64, device=task_vectors.device)
    HH = torch.stack([torch.stack([_heads_inner(one, other) for other in heads]) for one in heads])
    TT = inner_products(vectors_of(task_vectors, "tensor"))[0]
    RR = TT - TH - TH.T + HH
    empty = RR.diagonal() <= ROUNDING**2 * TT.diagonal()
    RR[empty], RR[:, empty] = 0, 0
    return Split(heads, HH, RR)


def _inner(tau: Float[Tensor, "out in"], head: LeadingDirections) -> float:
    """<tau, H> = sum_k s_k u_k^T tau v_k."""
    return float(((tau.double() @ head.right) * head.left * head.values).sum())


def _heads_inner(one: LeadingDirections, other: LeadingDirections) -> Tensor:
    """<H_s, H_t>."""
    return ((one.left.T @ other.left) * (one.right.T @ other.right) * one.values[:, None] * other.values).sum()


@method(
    "resmerge",
    title="ResMerge",
    paper="ResMerge, arXiv 2606.02252, 2026",
    low_rank="both",
    facts={
        "agreement": "of the residuals: 1 all alike, 1 / sqrt(number of experts) if they have nothing in common",
        "head_agreement": "mean cosine of the heads of two experts, negative ones counting 0",
    },
    flops=lambda tasks, rows, columns: (
        tasks * directions_flops(rows, columns, 1) + 2.0 * tasks * tasks * (rows + 2.0) * columns + 2.0 * tasks * rows * columns
    ),
    float64_elements=lambda tasks, rows, columns: (
        min(tasks, AT_ONCE) * (rows * columns + directions_elements(rows, columns, 1)) + 2.0 * rows * columns
    ),
)
def resmerge(task_vectors: Float[Tensor, "task out in"], options: ResMergeOptions, context: Context) -> Merged:  # noqa: ARG001
    """For experts trained by reinforcement: what is beside their leading directions, as far as they agree.

    tau_t = H_t + R_t with the leading singular direction H_t. Residuals R_t that agree more than unrelated ones are merged by
    direction and keep more of their length; others are averaged. A little of the H_t is added. One expert does not come back
    unchanged.
    """
    changed = changed_tasks(task_vectors)
    if not changed:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64), {"active_experts": 0})
    parts = split(task_vectors[changed], options.directions)
    x, agreement = residual_weights(parts.RR, options.trust)
    length = math.sqrt(max(0.0, float(x @ parts.RR @ x)))
    head_agreement = mean_of_pairs(lengths_and_cosines(parts.HH[None])[1][0].clamp(min=0))
    h = head_weight(parts.HH, options.head_share * head_agreement * length)
    weights = [0.0] * len(task_vectors)
    for t, weight in zip(changed, x.tolist(), strict=True):
        weights[t] = weight
    M = weighted_sum(task_vectors, weights)
    for head, weight in zip(parts.heads, x.tolist(), strict=True):
        M.addmm_(head.left * head.values, head.right.T, alpha=h - weight)  # sum_t x_t (tau_t - H_t) + h H_t
    return Merged(M, {"active_experts": len(changed), "agreement": agreement, "head_agreement": head_agreement})


def residual_weights(RR: Float[Tensor, "task task"], trust: float) -> tuple[Float[Tensor, " task"], float]:
    """x with A = sum_t x_t R_t, and the agreement c of the directions q_t = R_t / |R_t|.

    g = sum q / |sum q|, c = mean_t <q_t, g>. The mean if c <= 1 / sqrt(T), else c^beta mean|R| g, beta = 1 - trust * score.
    """
    T = len(RR)
    lengths, cosines = (found[0] for found in lengths_and_cosines(RR[None]))
    total = math.sqrt(max(0.0, float(cosines.sum())))  # |sum_t q_t|
    c = min(1.0, total / T)
    if c <= 1 / math.sqrt(T) * (1 + 1e-12):
        return torch.full_like(lengths, 1 / T), c
    score = ((mean_of_pairs(cosines) + 1) / 2 + (c + 1) / 2) / 2
    size = c ** (1 - trust * score) * float(lengths.mean())
    return torch.where(lengths > 0, size / (total * lengths), 0.0), c


def mean_of_pairs(cosines: Float[Tensor, "task task"]) -> float:
    """Over all pairs of different experts; an expert alone agrees with itself."""
    T = len(cosines)
    return float(cosines.sum() - cosines.diagonal().sum()) / (T * (T - 1)) if T > 1 else 1.0


def head_weight(HH: Float[Tensor, "task task"], length: float) -> float:
    """h such that sum_t h H_t is that long; 0 if the heads cancel."""
    together = math.sqrt(max(0.0, float(HH.sum())))
    return length / together if together > ROUNDING * math.sqrt(float(HH.diagonal().sum())) else 0.0
