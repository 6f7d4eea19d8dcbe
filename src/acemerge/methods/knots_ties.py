"""KnOTS-TIES: TIES-Merging in a basis that all experts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.expert_weights import weight_each
from acemerge.methods.registry import Alpha, Context, Merged, method
from acemerge.methods.ties import TiesOptions, TiesStatistics, elect_and_merge
from acemerge.numerics.dropping import Seed, drop
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import directions_elements, directions_flops, fixed_signs, leading_directions


@dataclass(frozen=True)
class KnotsTiesOptions(TiesOptions):
    """Defaults are the authors' for LoRA experts of ViT-B/32: keep 20% of all coordinates, disjoint mean, scale 0.6."""

    shared: Annotated[
        Literal["output", "input"],
        Field(description="the experts' common basis: of their outputs (the paper) or of their inputs"),
    ] = "output"
    spectrum: Annotated[
        Literal["before", "after"], Field(description="singular values multiply the coordinates before TIES (the paper) or after")
    ] = "before"
    cut: Annotated[float, Field(ge=0, allow_inf_nan=False, description="singular values up to this are left out")] = 1e-5
    drop: Annotated[
        float, Field(ge=0, lt=1, description="share of coordinates dropped at random before TIES, the others rescaled (DARE)")
    ] = 0.0
    seed: Seed = 0
    alpha: Alpha = 0.6


@dataclass(frozen=True)
class Aligned:
    """Task vectors as tau_t = basis Z_t."""

    basis: Float[Tensor, "out p"]
    coordinates: Float[Tensor, "task p in"]
    unique: bool
    """Whether every direction of the basis is determined: no two singular values coincide."""


def align(task_vectors: Float[Tensor, "task out in"], options: KnotsTiesOptions, context: Context) -> Aligned:
    """[tau_1 ... tau_T] = U diag(s) [V_1 ... V_T]: the basis U, and Z_t = diag(s) V_t in the task vectors' precision."""
    tasks, rows, columns = task_vectors.shape
    side_by_side = task_vectors.transpose(0, 1).reshape(rows, tasks * columns).double()
    found = leading_directions(side_by_side, min(side_by_side.shape))
    del side_by_side  # as large as everything else here
    kept = found.values > options.cut
    kept[-1:] = True  # experts that are all tiny still have a leading direction
    U, s, V = found.left[:, kept], found.values[kept], found.right[:, kept]
    del found
    signs = fixed_signs(_in_full(U, options, context.frame_of(task_vectors)))
    before, after = (s, torch.ones_like(s)) if options.spectrum == "before" else (torch.ones_like(s), s)
    Z = V.mul_(signs * before).to(task_vectors.dtype).T.reshape(-1, tasks, columns).transpose(0, 1)
    Z.mul_(task_vectors.flatten(1).any(1)[:, None, None])  # no change has no coordinates, where rounding leaves tiny ones
    if options.drop:
        Z = torch.stack([drop(Z_t, 1 - options.drop, "inverse", context.generator(options.seed, t)) for t, Z_t in enumerate(Z)])
    return Aligned(U * (signs * after), Z, unique=not bool((s.diff() <= 1e-12 * s[-1:]).any()))


def _in_full(basis: Float[Tensor, "p k"], options: KnotsTiesOptions, frame: Frame) -> Float[Tensor, "full k"]:
    """The basis in the tensor's own coordinates."""
    return frame.to_left(basis) if options.shared == "output" else frame.to_right(basis.T).T


def oriented(task_vectors: Float[Tensor, "task out in"], options: KnotsTiesOptions) -> Float[Tensor, "task _ _"]:
    """With the side that the experts share first."""
    return task_vectors if options.shared == "output" else task_vectors.mT


def _statistics(options: KnotsTiesOptions, experts: tuple[str, ...]) -> TiesStatistics:  # noqa: ARG001
    return TiesStatistics(options, prepare=lambda tau, context: align(oriented(tau, options), options, context).coordinates)


@method(
    "knots_ties",
    title="KnOTS-TIES",
    paper="Stoica et al., Model merging with SVD to tie the KnOTS, ICLR 2025",
    rest="keep",
    statistics=_statistics,
    facts={"directions": "that the experts have together"},
    low_rank=lambda options: "out" if options.shared == "output" else "in",  # coordinates on the other side are trimmed
    flops=lambda tasks, rows, columns: 4.0 * directions_flops(rows, tasks * columns, min(rows, tasks * columns)),
    float64_elements=lambda tasks, rows, columns: (
        (2.0 * tasks + 3) * rows * columns + directions_elements(rows, tasks * columns, min(rows, tasks * columns))
    ),
)
def knots_ties(task_vectors: Float[Tensor, "task out in"], options: KnotsTiesOptions, context: Context) -> Merged:
    """TIES on the experts' coordinates in a common basis, where their changes line up, instead of on single weights.

    Made for LoRA experts. One SVD of all experts of a matrix side by side gives the basis; one threshold per expert covers the
    coordinates of all matrices. Tensors that are not matrices stay at the base.
    """
    if not task_vectors.any():
        return Merged(torch.zeros_like(task_vectors[0]))
    statistics: TiesStatistics = context.statistics
    aligned = align(oriented(task_vectors, options), options, context)
    trimmed = statistics.trim(aligned.coordinates, context)
    weights = weight_each(options.weights, context.experts, context.tensor)
    M = aligned.basis @ elect_and_merge(trimmed, options.merge, statistics.majority_sign, weights).double()
    coincide = "two singular values of the experts side by side coincide: the common basis, and with it the merge, is not unique"
    return Merged(
        M if options.shared == "output" else M.T,
        {"directions": aligned.basis.shape[1]},
        warnings=() if aligned.unique else (coincide,),
    )
