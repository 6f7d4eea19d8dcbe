"""DC-Merge: experts in coordinates that they share, of which the largest are elected, each expert in a block of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Literal

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
)
from acemerge.numerics.threads import AT_ONCE, share
from acemerge.numerics.thresholds import count_of_share

TIE = 1e-9
"""Magnitudes that differ by less than this share are equal: rounding must not choose among them."""


@dataclass(frozen=True)
class DcMergeOptions(Options):
    """Defaults are the authors' for full fine-tunes; of adapters they take 16 directions each and smooth their values."""

    rank: Annotated[
        Annotated[int, Field(ge=1)] | Literal["share"],
        Field(description="directions taken from each expert; 'share': an equal share of the min(out, in) that there are"),
    ] = "share"
    smoothing: Annotated[
        Literal["none", "average", "linear"],
        Field(description="of an expert's singular values: all made equal, or falling in equal steps; their sum stays"),
    ] = "none"
    ratio: Annotated[
        float, Field(ge=1, allow_inf_nan=False, description="linear: the largest value in terms of the smallest, at most")
    ] = 5.0
    density: Annotated[float, Field(gt=0, le=1, description="share of an expert's coordinates, the largest, that is kept")] = 1e-3


@method(
    "dc_merge",
    title="DC-Merge",
    paper="DC-Merge, CVPR 2026, arXiv 2603.06242",
    low_rank="both",
    facts={
        "directions_each": "leading singular directions taken from each expert",
        "coordinates_each": "coordinates kept of each expert, before the election",
        **WEAKEST_DIRECTION,
    },
    flops=lambda tasks, rows, columns: (
        tasks * directions_flops(rows, columns, min(rows, columns) // tasks)
        + orthogonalised_flops(rows, columns)
        + 2.0 * (rows + columns + min(rows, columns)) * min(rows, columns) ** 2
    ),
    float64_elements=lambda tasks, rows, columns: max(
        min(tasks, AT_ONCE) * (rows * columns + directions_elements(rows, columns, min(rows, columns))),
        orthogonalised_elements(rows, columns) + 5.0 * min(rows, columns) ** 2,
    ),
)
def dc_merge(task_vectors: Float[Tensor, "task out in"], options: DcMergeOptions, context: Context) -> Merged:
    """The largest of each expert's coordinates in TSV-M's directions, elected as in TIES.

    P = polar([U_1 ... U_T]), Q = polar([V_1 ... V_T]) of k directions each. A_t = P^T x_t Q is cut to its largest entries, those
    that agree with the sign of their sum are averaged, and what lies within one expert's k x k block is used: M = P B Q^T.
    """
    changed, r = changed_tasks(task_vectors), min(context.frame_of(task_vectors).shape)
    k = r // len(changed) if changed else 0
    if k == 0:
        few = f"{len(changed)} experts share the {r} directions of this matrix: none is left for each, so it stays at the base"
        zeros = torch.zeros_like(task_vectors[0], dtype=torch.float64)
        return Merged(zeros, {"active_experts": len(changed)}, warnings=(few,) if changed else ())
    side = r
    if options.rank != "share":
        k = min(options.rank, k)
        side = k * len(changed)
    kept = max(1, count_of_share(side * side, options.density))
    experts = share(lambda t: smooth(leading_directions(task_vectors[t].double(), k), options), changed, AT_ONCE)
    together = orthogonalise(experts)
    P, Q = together.left, together.right
    bounds = accumulate((len(own.values) for own in experts), initial=0)
    blocks = [slice(start, end) for start, end in pairwise(bounds)]
    elected = elect(torch.stack([own_coordinates(own, P, Q, kept, blocks) for own in experts]))
    M = torch.zeros_like(task_vectors[0], dtype=torch.float64)
    for block, B in zip(blocks, elected.split([(block.stop - block.start) ** 2 for block in blocks]), strict=True):
        size = block.stop - block.start
        M.addmm_(P[:, block] @ B.reshape(size, size), Q[:, block].T)
    facts = {"active_experts": len(changed), "directions_each": k, "coordinates_each": kept, **together.facts}
    return Merged(M, facts, warnings=together.warnings)


def smooth(own: LeadingDirections, options: DcMergeOptions) -> LeadingDirections:
    """The same directions with smoother values of the same sum; R = min(ratio, s_1 / s_k) is what is left of their decay."""
    s = own.values
    if options.smoothing == "none" or not len(s):
        return own
    R = min(options.ratio, float(s[-1] / s[0])) if options.smoothing == "linear" else 1.0
    falling = torch.linspace(1.0, R, len(s), dtype=s.dtype, device=s.device)
    return replace(own, values=falling * (s.sum() / falling.sum()))


def own_coordinates(
    own: LeadingDirections, P: Float[Tensor, "m k"], Q: Float[Tensor, "n k"], kept: int, blocks: Sequence[slice]
) -> Float[Tensor, " entries"]:
    """What lies in the blocks of A_t = P^T U_t diag(s_t) V_t^T Q, 0 for what is not among its largest entries."""
    A = (P.T @ (own.left * own.values)) @ (own.right.T @ Q)
    magnitudes = A.abs()
    threshold = float(magnitudes.reshape(-1).kthvalue(max(1, A.numel() - kept + 1)).values)
    A[magnitudes < threshold * (1 - TIE)] = 0
    return torch.cat([A[block, block].reshape(-1) for block in blocks])


def elect(coordinates: Float[Tensor, "task entries"]) -> Float[Tensor, " entries"]:
    """The mean of the entries that have the sign of their sum; 0 where they cancel."""
    agree = coordinates * coordinates.sum(0).sign() > 0
    return (coordinates * agree).sum(0) / agree.sum(0).clamp(min=1)
