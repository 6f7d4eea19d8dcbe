"""SCE: select the entries in which the experts differ, calculate weights from their energy, erase what the majority opposes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import row_blocks, sum_of_squares
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class SceOptions(Options):
    """Nothing is selected by default, as in mergekit, which has the authors' code."""

    select: Annotated[
        float, Field(gt=0, le=1, description="share of a tensor's entries kept, tau: those that differ most; 1 keeps all")
    ] = 1.0


def selected(entries: Float[Tensor, "task n"], share: float) -> Bool[Tensor, " n"]:
    """The share of largest variance among the entries in which the experts differ at all; ties by position."""
    variance = torch.empty(entries.shape[1], dtype=torch.float64, device=entries.device)
    for block in row_blocks(len(variance), len(entries)):
        variance[block] = entries[:, block].double().var(0, correction=0)
    count = count_of_share(int(variance.count_nonzero()), share)
    chosen = torch.zeros(len(variance), dtype=torch.bool, device=entries.device)
    chosen[variance.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def energy_weights(entries: Float[Tensor, "task n"]) -> list[float]:
    """eta_t = |delta_t|^2 / sum_s |delta_s|^2; zeros if there is nothing to weigh."""
    energies = [sum_of_squares(row) for row in entries]
    total = math.fsum(energies)
    return [energy / total if total else 0.0 for energy in energies]


def mean_of_majority(entries: Float[Tensor, "task n"], weights: list[float]) -> Float[Tensor, " n"]:
    """By entry: the sign of the plain sum (0 counts as positive), and the weighted mean of the values that have it."""
    eta = torch.tensor(weights, dtype=torch.float64, device=entries.device)
    merged = torch.empty(entries.shape[1], dtype=torch.float64, device=entries.device)
    for block in row_blocks(len(merged), len(entries)):
        delta = entries[:, block].double()
        sign = (delta.sum(0) >= 0).double().mul_(2).sub_(1)
        agreeing = (delta * sign).relu_()  # the magnitudes of those that have it
        total = eta @ agreeing
        share = eta @ agreeing.sign_()
        merged[block] = total.div_(share.masked_fill_(share == 0, 1)).mul_(sign).add_(0.0)  # no negative zeros
    return merged


@method(
    "sce",
    title="SCE, select, calculate, erase",
    paper="Wan et al., FuseChat: Knowledge Fusion of Chat Models, 2024",
    touches="all",
    facts={"weight_{expert}": "eta: {expert}'s share of the squared changes that were selected"},
    flops=lambda tasks, rows, columns: 12.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.5 * tasks + 3.0) * rows * columns,
)
def sce(task_vectors: Float[Tensor, "task *shape"], options: SceOptions, context: Context) -> Merged:
    """Experts weighted by energy, without what most oppose: M = sum of agreeing eta_t tau_t / sum of agreeing eta_t.

    Per tensor: select the entries that vary most between the experts, calculate eta_t = |tau_t|^2 / sum_s |tau_s|^2 from them,
    erase the values whose sign is not that of the sum.
    """
    entries = task_vectors.reshape(len(task_vectors), -1)
    if options.select < 1:
        entries = torch.where(selected(entries, options.select), entries, 0.0)
    weights = energy_weights(entries)
    facts = {f"weight_{expert}": weight for expert, weight in zip(context.experts, weights, strict=True)}
    return Merged(mean_of_majority(entries, weights).reshape(task_vectors.shape[1:]), facts)
