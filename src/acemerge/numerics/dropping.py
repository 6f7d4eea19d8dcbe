"""Dropping entries at random and rescaling the others: what DARE and DELLA share."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from acemerge.numerics.linalg import row_blocks

Rescale = Annotated[
    Literal["inverse", "l1", "none"],
    Field(
        description="kept entries: divided by their keep probability (the paper), multiplied by one factor that restores the "
        "tensor's L1 norm (mergekit), or left alone"
    ),
]
Seed = Annotated[int, Field(ge=0, description="of the random numbers; every expert and tensor draws its own from it")]


def drop(task_vector: Tensor, keep: float | Tensor, rescale: str, generator: torch.Generator) -> Tensor:
    """d = b o tau, rescaled, with b ~ Bernoulli(keep) per entry; `keep` is one probability or one per entry.

    The numbers are drawn in float32 on the CPU, whatever the task vector's dtype and device.
    """
    draws = torch.rand(task_vector.shape, generator=generator, dtype=torch.float32).to(task_vector.device)
    dropped = torch.where(draws < keep, task_vector, 0.0)
    if rescale == "inverse":
        dropped /= keep
    elif rescale == "l1" and (left := l1_norm(dropped)) > 0:
        dropped *= l1_norm(task_vector) / left
    return dropped


def l1_norm(x: Tensor) -> float:
    """|x|_1, accumulated in float64."""
    flat = x.reshape(-1)
    return sum(float(flat[block].double().abs().sum()) for block in row_blocks(flat.numel(), 1))
