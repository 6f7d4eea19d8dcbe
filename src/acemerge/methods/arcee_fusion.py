"""Arcee Fusion: of one expert's changes, those that stand out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import row_blocks
from acemerge.numerics.vectors import vectors_of

FLOOR = 1e-8  # added to every probability, as in mergekit


@dataclass(frozen=True)
class ArceeFusionOptions(Options):
    """The threshold is found, not set."""


@method(
    "arcee_fusion",
    title="Arcee Fusion",
    paper="Arcee AI, MergeKit v0.1, 2025, where it comes from",
    touches="all",
    experts=1,
    facts={"kept_share": "share of entries whose change is taken over"},
    flops=lambda tasks, rows, columns: 60.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 4.0 * rows * columns,  # noqa: ARG005
)
def arcee_fusion(task_vectors: Float[Tensor, "task *shape"], options: ArceeFusionOptions, context: Context) -> Merged:  # noqa: ARG001
    """One expert's changes where they stand out from the tensor's: M = tau where importance >= median + 1.5 IQR, else 0.

    An entry's importance is |tau| times the Kullback-Leibler divergence between its row's softmax in the expert and in the base.
    """
    if len(task_vectors) != 1:
        experts = ", ".join(context.experts)
        raise InputError(f"tensor '{context.tensor}': arcee_fusion takes exactly 1 expert, not {len(task_vectors)} ({experts})")
    rows = vectors_of(task_vectors, "row")[0]
    base = None if context.base is None else vectors_of(context.base[None], "row")[0]
    scores = importance(rows, base)
    if scores.numel() == 0:
        return Merged(task_vectors[0].clone())
    chosen = scores >= threshold(scores.reshape(-1))
    M = torch.where(chosen, rows, 0.0)
    return Merged(M.reshape(task_vectors.shape[1:]), {"kept_share": float(chosen.double().mean())})


def importance(rows: Float[Tensor, "m n"], base: Float[Tensor, "m n"] | None) -> Float[Tensor, "m n"]:
    """|tau| KL(softmax(W0 + tau) || softmax(W0)) by row, in float64: of small changes, float32 has no digit of the divergence."""
    scores = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    for block in row_blocks(*rows.shape):
        tau = rows[block].double()
        W0 = torch.zeros_like(tau) if base is None else base[block].to(tau)
        p, q = ((W.softmax(1) + FLOOR) for W in (W0 + tau, W0))
        r = (p - q) / q
        # p log(p / q) = q (1 + r) log(1 + r). The q r add up to nothing; without them no digits cancel.
        scores[block] = tau.abs() * (q * ((1 + r) * r.log1p() - r)).sum(1, keepdim=True)
    return scores


def threshold(scores: Float[Tensor, " n"]) -> float:
    """median + 1.5 (third quartile - first quartile), each the value at the place below it in order."""
    last = len(scores) - 1
    first, median, third = (float(scores.kthvalue(last * quarter // 4 + 1).values) for quarter in (1, 2, 3))
    return median + 1.5 * (third - first)
