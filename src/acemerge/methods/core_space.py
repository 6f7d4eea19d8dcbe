"""Core Space: any merging method on the small cores that low-rank experts have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.inner import InnerOptions, PreparedStatistics, inner_facts, merge_prepared, prepared_statistics
from acemerge.methods.registry import Alpha, Context, Merged, Method, Options, get_method, method
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import directions_flops, fixed_signs, leading_directions


@dataclass(frozen=True)
class CoreSpaceOptions(InnerOptions):
    """Defaults are the authors' for TSV-M in core space."""

    outer: ClassVar[str] = "core_space"

    inner: Annotated[
        str, Field(description="the method that merges the cores, with its own default options; its alpha is not used")
    ] = "tsv_m"
    alpha: Alpha = 0.2

    def inner_method(self) -> tuple[Method, Options]:
        """The method for the cores and its options; the final scale is ours."""
        inner = get_method(self.inner)
        return inner, inner.options({"alpha": 1.0}).resolve({})


@dataclass(frozen=True)
class Core:
    """Task vectors as tau_t = left C_t right^T, with orthonormal left and right."""

    left: Float[Tensor, "out p"]
    right: Float[Tensor, "in q"]
    cores: Float[Tensor, "task p q"]


def core_of(task_vectors: Float[Tensor, "task out in"], frame: Frame) -> Core:
    """Bases of what all experts write (columns) and read (rows), from truncated SVDs tau_t = B_t A_t at the numerical rank.

    A basis is given up to signs. They are fixed in the tensor's own coordinates, so that they do not depend on the frame's.
    """
    written, read = [], []
    for task_vector in task_vectors:
        own = leading_directions(task_vector.double(), min(task_vector.shape))
        written.append(own.left * own.values.sqrt())
        read.append(own.right * own.values.sqrt())
    left, right = _basis(written), _basis(read)
    left, right = left * fixed_signs(frame.to_left(left)), right * fixed_signs(frame.to_right(right.T).T)
    return Core(left, right, torch.stack([left.T @ task_vector.double() @ right for task_vector in task_vectors]))


def _basis(factors: list[Tensor]) -> Float[Tensor, "side p"]:
    """An orthonormal basis of all the factors' columns; the factors are used up."""
    stacked = torch.cat(factors, 1)
    factors.clear()
    return leading_directions(stacked, min(stacked.shape)).left


def _cores(task_vectors: Tensor, context: Context) -> tuple[Tensor, Context]:
    return core_of(task_vectors, context.frame_of(task_vectors)).cores, replace(context, frame=None)


def _statistics(options: CoreSpaceOptions, experts: tuple[str, ...]) -> PreparedStatistics | None:
    return prepared_statistics(options, experts, _cores)


def _facts(options: CoreSpaceOptions) -> dict[str, str]:
    own = {"core_rows": "output directions of the core space", "core_columns": "input directions of the core space"}
    return {**own, **inner_facts(options)}


@method(
    "core_space",
    title="Core Space merging",
    paper="Panariello et al., Accurate and efficient low-rank model merging in core space, NeurIPS 2025",
    rest="keep",
    statistics=_statistics,
    low_rank=lambda options: "both" if options.inner != "nan" else None,  # which may ask for the norms of whole weights
    facts=_facts,
    flops=lambda tasks, rows, columns: (2 * tasks + 2) * directions_flops(rows, columns, min(rows, columns)),
    float64_elements=lambda tasks, rows, columns: (
        tasks * (2.0 * (rows + columns) * min(rows, columns) + rows * columns) + 3.0 * min(max(rows, columns), tasks * rows) ** 2
    ),
)
def core_space(task_vectors: Float[Tensor, "task out in"], options: CoreSpaceOptions, context: Context) -> Merged:
    """Merge low-rank experts where they live: in a small core space that holds all of them without loss.

    tau_t = U C_t V^T with bases common to all experts; M = U g(C_1, ..., C_T) V^T for the method g named by `inner`. Directions
    that no expert has cannot disturb g. Made for LoRA experts; with full-rank experts it is a rotation of the full space.
    """
    core = core_of(task_vectors, context.frame_of(task_vectors))
    p, q = core.cores.shape[1:]
    if not p or not q:
        return Merged(torch.zeros_like(task_vectors[0], dtype=torch.float64))
    base = None
    if context.base is not None and context.frame is None:  # with a frame nobody asks for it: see `low_rank` above
        base = core.left.T @ context.base.to(core.left) @ core.right
    merged = merge_prepared(options, core.cores, replace(context, base=base, frame=None))
    facts = {"core_rows": p, "core_columns": q, **merged.facts}
    return replace(merged, delta=core.left @ merged.delta.double() @ core.right.T, facts=facts)
