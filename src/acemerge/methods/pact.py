"""PACT: experts kept away from the base's input directions that the other experts still rely on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.inner import (
    InnerOptions,
    PreparedStatistics,
    inner_core_sides,
    inner_facts,
    merge_prepared,
    prepared_statistics,
)
from acemerge.methods.registry import Context, Merged, method
from acemerge.numerics.frame import Sides
from acemerge.numerics.linalg import changed_tasks, directions_flops, leading_directions, sum_of_squares
from acemerge.numerics.threads import AT_ONCE, share
from acemerge.numerics.thresholds import count_of_share

NO_DIRECTION = 1e-6
"""Singular values up to this share of the largest belong to no direction of a span."""


@dataclass(frozen=True)
class PactOptions(InnerOptions):
    """Numbers of directions are the authors' for full fine-tunes; of adapters they take the adapter's rank."""

    outer: ClassVar[str] = "pact"

    base_share: Annotated[
        float, Field(gt=0, le=1, description="share of the base's input directions, the strongest, that are protected")
    ] = 0.8
    rewritten: Annotated[
        int, Field(ge=0, description="leading input directions of an expert that it does not need protected: it rewrote them")
    ] = 10


def filtered(task_vectors: Float[Tensor, "task out in"], context: Context, options: PactOptions) -> Float[Tensor, "task out in"]:
    """tau'_j = tau_j - tau_j S_j S_j^T, S_j a basis of what all other experts rely on together.

    What expert t relies on: R_t, a basis of (I - V_t V_t^T) V0, V0 the base's leading right singular vectors and V_t its own.
    All of these lie in the span of V0 and the V_t, so bases are found in coordinates of that.
    """
    changed = changed_tasks(task_vectors)
    if context.base is None or len(changed) < 2:
        return task_vectors.double()
    r = min(context.frame_of(task_vectors).shape)
    W0 = context.base.to(task_vectors.device).double()
    V0 = leading_directions(W0, max(1, count_of_share(r, options.base_share))).right
    V = share(lambda t: leading_directions(task_vectors[t].double(), min(options.rewritten, r)).right, changed, AT_ONCE)
    Q = span([V0, *V])
    relied = share(lambda own: relied_on(Q.T @ V0, Q.T @ own), V, AT_ONCE)
    result = task_vectors.to(torch.float64, copy=True)

    def remove(place: int) -> None:
        S = Q @ span([*relied[:place], *relied[place + 1 :]])
        result[changed[place]] -= (result[changed[place]] @ S) @ S.T

    share(remove, range(len(changed)), AT_ONCE)
    return result


def relied_on(V0: Float[Tensor, "n K"], V: Float[Tensor, "n k"]) -> Float[Tensor, "n some"]:
    """R_t."""
    rest = leading_directions(V0 - V @ (V.T @ V0), V0.shape[1])
    return rest.left[:, rest.values > NO_DIRECTION]


def span(bases: Sequence[Float[Tensor, "n some"]]) -> Float[Tensor, "n k"]:
    """An orthonormal basis of all their columns together, and of nothing else: QR would fill it up with arbitrary directions."""
    stacked = torch.cat(list(bases), 1)
    found = leading_directions(stacked, min(stacked.shape))
    return found.left[:, found.values > NO_DIRECTION * found.values[-1:]]


def _core_sides(options: PactOptions) -> Sides | None:
    """What experts read is compared with the base, whose directions no core of theirs holds; what they write is not."""
    return "out" if inner_core_sides(options) in ("both", "out") else None


def _statistics(options: PactOptions, experts: tuple[str, ...]) -> PreparedStatistics | None:
    return prepared_statistics(options, experts, lambda tau, context: (filtered(tau, context, options), context))


@method(
    "pact",
    title="PACT",
    paper="PACT, arXiv 2606.18627, 2026",
    statistics=_statistics,
    low_rank=_core_sides,
    facts=lambda options: {"kept_share": "of the experts' length, what the filter left", **inner_facts(options)},
    flops=lambda tasks, rows, columns: (
        (tasks + 2.0) * directions_flops(rows, columns, min(rows, columns))
        + tasks * (tasks + 12.0) * min(rows, columns) ** 3
        + 4.0 * tasks * rows * columns * min(rows, columns)
    ),
    float64_elements=lambda tasks, rows, columns: (
        tasks * (rows * columns + 2.0 * min(rows, columns) ** 2)
        + min(tasks, AT_ONCE) * (rows * columns + (tasks + 3.0) * min(rows, columns) ** 2 + columns * min(rows, columns))
        + 2.0 * columns * min(rows, columns)
    ),
)
def pact(task_vectors: Float[Tensor, "task out in"], options: PactOptions, context: Context) -> Merged:
    """A step before another method: no expert changes the base along inputs that the others rely on.

    An expert relies on the base's strongest input directions, but for those that it rewrote itself. Needs the base's weights.
    With three experts or more little may be left: see `kept_share`.
    """
    prepared = filtered(task_vectors, context, options)
    merged = merge_prepared(options, prepared, context)
    before = sum_of_squares(task_vectors)
    kept = (sum_of_squares(prepared) / before) ** 0.5 if before else 1.0
    unknown = "no base weights are at hand: nothing is filtered"
    warnings = merged.warnings if context.base is not None else (*merged.warnings, unknown)
    return replace(merged, facts={"kept_share": kept, **merged.facts}, warnings=warnings)
