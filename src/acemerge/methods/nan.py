"""NAN: coefficients inversely proportional to the experts' norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import sum_of_squares, weighted_sum


@dataclass(frozen=True)
class NanOptions(Options):
    """There is no official code: what the norms are of, and the global factor, are our reading of the paper."""

    norm_of: Annotated[
        Literal["weights", "delta"], Field(description="N_t: the norm of the expert's weights W_t, or of its task vector tau_t")
    ] = "weights"
    scope: Annotated[Literal["model", "layer"], Field(description="norms over the whole model, or of each tensor")] = "model"
    scale: Annotated[Literal["half_tasks", "one"], Field(description="s: half the number of experts, or 1")] = "half_tasks"


class Norms:
    """Each expert's norm over the tensors seen."""

    def __init__(self, norm_of: str) -> None:
        self._norm_of = norm_of
        self._squares: dict[str, float] = {}

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """Add one tensor."""
        base = context.base.to(task_vectors.device) if self._norm_of == "weights" and context.base is not None else 0
        for expert, tau in zip(context.experts, task_vectors, strict=True):
            self._squares[expert] = self._squares.get(expert, 0.0) + sum_of_squares(tau + base)

    def end_pass(self) -> bool:
        """One pass is enough."""
        return False

    def of(self, experts: Sequence[str]) -> list[float]:
        """N_t."""
        return [math.sqrt(self._squares[expert]) for expert in experts]


def coefficients(norms: list[float]) -> list[float]:
    """a_t = (1/N_t) / sum_s (1/N_s), which sum to 1; an expert without a norm is left out, with a_t = 0."""
    smallest = min((N for N in norms if N > 0), default=0.0)
    inverse = [smallest / N if N > 0 else 0.0 for N in norms]  # relative to the smallest: 1/N_t may overflow
    total = math.fsum(inverse)
    return [value / total for value in inverse] if total else inverse


@method(
    "nan",
    title="NAN, norm-aware coefficients",
    paper="Si et al., NAN: A Training-Free Solution to Coefficient Estimation in Model Merging, 2025",
    touches="all",
    low_rank=lambda options: "both" if options.norm_of == "delta" else None,  # norms of whole weights have no small core
    facts={"coefficient_{expert}": "what {expert}'s change was multiplied by"},
    statistics=lambda options, experts: Norms(options.norm_of) if options.scope == "model" else None,  # noqa: ARG005
    flops=lambda tasks, rows, columns: 4.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 2.0 * rows * columns,  # noqa: ARG005
)
def nan(task_vectors: Float[Tensor, "task *shape"], options: NanOptions, context: Context) -> Merged:
    """Experts weighted by one over their norms; LOW CONFIDENCE, no official code: M = s sum_t a_t tau_t.

    Whose norm (weights or task vector), over what (model or tensor) and the factor s are unsettled; each is an option, the
    defaults are our reading. Weight norms of fine-tunes are nearly equal, so the default is close to task arithmetic with
    alpha 1/2; norm_of=delta turns down the experts that moved furthest. Say which variant with any result.
    """
    warnings = []
    norms: Norms = context.statistics
    if options.scope == "layer":
        norms = Norms(options.norm_of)
        norms.observe(task_vectors, context)
    a = coefficients(norms.of(context.experts))
    active = sum(weight > 0 for weight in a)
    s = active / 2 if options.scale == "half_tasks" else 1.0
    if options.norm_of == "weights" and context.base is None:
        warnings.append("no base weights are at hand: the norms are those of the task vectors")
    if active == 1 and s != 1:
        warnings.append(f"one expert with scale=half_tasks: its change is multiplied by {s}; scale=one keeps it whole")
    scaled = [s * weight for weight in a]
    facts = {f"coefficient_{expert}": weight for expert, weight in zip(context.experts, scaled, strict=True)}
    return Merged(weighted_sum(task_vectors, scaled), facts, tuple(warnings))
