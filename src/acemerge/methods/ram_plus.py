"""RAM+: RAM, with what only one expert changed made larger the more of its changes are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.ram import RamOptions, who_changed
from acemerge.methods.registry import Context, method


@dataclass(frozen=True)
class RamPlusOptions(RamOptions):
    """Strength and limit are those of mergekit, which calls them r and alpha as the paper does."""

    strength: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="r: how much overlap makes unique changes larger")
    ] = 0.1
    limit: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="the overlap that counts at most, the paper's alpha")
    ] = 0.2
    scope: Annotated[
        Literal["model", "tensor"],
        Field(description="an expert's overlap over the whole model (paper), or in each tensor (mergekit)"),
    ] = "model"


_COUNTING = Lock()  # of all threads; not an attribute, because statistics travel between processes


class Overlaps:
    """How many of each expert's changed entries others changed too, and how many it alone."""

    def __init__(self, options: RamPlusOptions) -> None:
        self._options = options
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """Count one tensor, or a piece of one; may be called from several threads."""
        changed, count = who_changed(task_vectors, self._options.epsilon)
        for expert, own in zip(context.experts, changed, strict=True):
            shared, unique = int((own & (count > 1)).sum()), int((own & (count == 1)).sum())
            with _COUNTING:
                before = self._counts.get(self._key(expert, context), (0, 0))
                self._counts[self._key(expert, context)] = (before[0] + shared, before[1] + unique)

    def end_pass(self) -> bool:
        """One pass is enough."""
        return False

    def scales(self, context: Context) -> Sequence[float]:
        """lambda_t = 1 + r min(rho_t, limit), rho_t = shared / unique; who has nothing unique has nothing to scale."""
        scales = []
        for expert in context.experts:
            shared, unique = self._counts[self._key(expert, context)]
            rho = shared / unique if unique else 0.0
            scales.append(1 + self._options.strength * min(rho, self._options.limit))
        return scales

    def _key(self, expert: str, context: Context) -> tuple[str, str]:
        return expert, context.tensor if self._options.scope == "tensor" else ""


@method(
    "ram_plus",
    title="Reinforced Agent Merging, with rescaling",
    paper="Yuan et al., Behavior Knowledge Merge in Reinforced Agentic Models, 2026",
    touches="all",
    elementwise=True,
    statistics=lambda options, experts: Overlaps(options),  # noqa: ARG005
    flops=lambda tasks, rows, columns: 10.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.7 * tasks + 2.0) * rows * columns,
)
def ram_plus(task_vectors: Float[Tensor, "task *shape"], options: RamPlusOptions, context: Context) -> Float[Tensor, "*shape"]:
    """RAM, what one expert alone changed made larger: M = lambda_t tau_t there, the mean where several changed an entry.

    lambda_t = 1 + strength min(rho_t, limit), rho_t being how many of the expert's changed entries are shared for each that is
    not: it makes up for what averaging takes from the shared ones.
    """
    overlaps: Overlaps = context.statistics
    changed, count = who_changed(task_vectors, options.epsilon)
    scales = torch.tensor(overlaps.scales(context), dtype=task_vectors.dtype, device=task_vectors.device)
    lambdas = scales.view(-1, *[1] * (task_vectors.dim() - 1))
    return (task_vectors * changed * torch.where(count == 1, lambdas, 1.0)).sum(0) / count.clamp(min=1)
