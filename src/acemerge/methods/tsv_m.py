"""TSV-M: each expert's leading singular directions, made orthogonal to those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.methods.option_text import Fact
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import (
    LeadingDirections,
    changed_tasks,
    directions_elements,
    directions_flops,
    leading_directions,
    polar,
)
from acemerge.numerics.threads import AT_ONCE, share

SAME_DIRECTION = 1e-5
"""Experts' directions closer than this (in radians) are one: their difference is float32 rounding, not something to amplify."""


@dataclass(frozen=True)
class TsvMOptions(Options):
    """Only the common scale, 1 where no validation data chooses one."""


def orthogonalised_flops(rows: int, columns: int) -> float:
    """Both polar factors of r stacked directions and the product of the three factors, r = min(rows, columns)."""
    r = min(rows, columns)
    return 4.0 * (rows + columns) * r * r + 8.0 * r**3 + 2.0 * rows * columns * r


def orthogonalised_elements(rows: int, columns: int) -> float:
    """float64 numbers held meanwhile: all directions, their stacks, what both polar factors take, and M."""
    r = min(rows, columns)
    return (5.0 * (rows + columns) + 6.0 * r) * r + rows * columns


WEAKEST_DIRECTION = {"weakest_direction": "how independent the experts' directions are: near 0, some share one"}


@dataclass(frozen=True)
class Orthogonalised:
    """P = polar([U_1 U_2 ...]) and Q = polar([V_1 V_2 ...]) of several sets of directions, with all their singular values."""

    left: Float[Tensor, "m k"]
    values: Float[Tensor, " k"]
    right: Float[Tensor, "n k"]
    facts: dict[str, Fact]
    warnings: tuple[str, ...]


def orthogonalise(directions: Sequence[LeadingDirections]) -> Orthogonalised:
    """The nearest orthonormal directions to all of them together.

    Unique only if they are linearly independent. Those of duplicate experts are not: then only the range they have is used.
    """
    sides = [torch.cat([own.left for own in directions], 1), torch.cat([own.right for own in directions], 1)]
    left, right = share(lambda side: polar(side, SAME_DIRECTION), sides)
    weakest = min(float(left.values[0]), float(right.values[0]))
    shared = f"some experts share leading directions (to {weakest:.0e}): only the range that they have together is used"
    return Orthogonalised(
        left.factor,
        torch.cat([own.values for own in directions]),
        right.factor,
        {"weakest_direction": weakest},
        warnings=(shared,) if left.deficient or right.deficient else (),
    )


@method(
    "tsv_m",
    title="TSV-M",
    paper="Gargiulo et al., Task singular vectors, CVPR 2025",
    low_rank="both",
    facts={"directions_each": "leading singular directions taken from each expert", **WEAKEST_DIRECTION},
    flops=lambda tasks, rows, columns: (
        tasks * directions_flops(rows, columns, min(rows, columns) // tasks) + orthogonalised_flops(rows, columns)
    ),
    float64_elements=lambda tasks, rows, columns: max(
        min(tasks, AT_ONCE) * (rows * columns + directions_elements(rows, columns, min(rows, columns))),
        orthogonalised_elements(rows, columns),
    ),
)
def tsv_m(task_vectors: Float[Tensor, "task out in"], options: TsvMOptions, context: Context) -> Merged:  # noqa: ARG001
    """An equal share of each expert's leading singular directions, freed from interference by orthogonalising them.

    k = floor(r / T) triples of each expert, stacked as U, s, V: M = polar(U) diag(s) polar(V)^T. Experts that did not change a
    matrix do not count in T. One expert comes back unchanged.
    """
    changed, r = changed_tasks(task_vectors), min(context.frame_of(task_vectors).shape)
    k = r // len(changed) if changed else 0
    if k == 0:
        few = f"{len(changed)} experts share the {r} directions of this matrix: none is left for each, so it stays at the base"
        zeros = torch.zeros_like(task_vectors[0], dtype=torch.float64)
        return Merged(zeros, {"active_experts": len(changed)}, warnings=(few,) if changed else ())
    directions = share(lambda t: leading_directions(task_vectors[t].double(), k), changed, AT_ONCE)
    together = orthogonalise(directions)
    facts = {"active_experts": len(changed), "directions_each": k, **together.facts}
    warnings = list(together.warnings)
    poor = sum(len(own.values) < k for own in directions)
    if poor:
        warnings.append(f"{poor} of {len(changed)} experts have rank below {k} here: only the directions they have take part")
    return Merged((together.left * together.values) @ together.right.T, facts, warnings=tuple(warnings))
