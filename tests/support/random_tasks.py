"""Random task vectors in float64, dense and of low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from acemerge.numerics.frame import Factors, Frame, to_cores


def random_tasks(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(tasks: int, rows: int, columns: int, rank: int) -> tuple[Tensor, Frame, Tensor]:
    """Dense task vectors of low rank, and the same as cores in a frame."""
    left, right = random_tasks(tasks, rows, rank), random_tasks(tasks, rank, columns, seed=1)
    frame, cores = to_cores([Factors(a, b) for a, b in zip(left, right, strict=True)], (rows, columns), "both")
    return left @ right, frame, cores
