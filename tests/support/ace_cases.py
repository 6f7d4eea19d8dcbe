"""Task vectors for ACE: both of its branches, every shape, given spectra and ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Norms = Literal["similar", "different"]
NORMS: dict[Norms, tuple[float, float]] = {"similar": (1.8, 2.2), "different": (0.5, 3.0)}  # gamma < 0.3, gamma > 0.3
BRANCHES: tuple[Norms, ...] = ("similar", "different")
SHAPES = {
    "square": (24, 24),
    "wide": (20, 40),
    "dual": (6, 160),
    "tall": (96, 14),
    "two_rows": (2, 50),
    "two_cols": (50, 2),
}


def experts(tasks: int, rows: int, cols: int, norms: Norms, *, decay: float = 0.0, seed: int = 0) -> Tensor:
    """Random float64 task vectors whose rows share an input covariance with singular values i^-decay."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(cols, cols, generator=generator, dtype=torch.float64))
    spectrum = torch.arange(1, cols + 1, dtype=torch.float64) ** -decay
    rows_of_noise = torch.randn(tasks, rows, cols, generator=generator, dtype=torch.float64)
    return with_norms(rows_of_noise @ (basis * spectrum) @ basis.T, torch.linspace(*NORMS[norms], tasks).tolist())


def with_norms(task_vectors: Tensor, norms: list[float]) -> Tensor:
    factors = torch.tensor(norms, dtype=torch.float64) / task_vectors.square().sum(dim=(1, 2)).sqrt()
    return task_vectors * factors[:, None, None]


def low_rank_experts(tasks: int, rows: int, cols: int, rank: int, *, shared: str = "", seed: int = 0) -> Tensor:
    """LoRA-like task vectors B A of very different scale, on a dyadic grid: exactly of that rank in float32 too."""
    generator = torch.Generator().manual_seed(seed)
    B = torch.randint(-8, 9, (1 if shared == "B" else tasks, rows, rank), generator=generator).double()
    A = torch.randint(-8, 9, (1 if shared == "A" else tasks, rank, cols), generator=generator).double()
    scale = torch.tensor([2.0 ** -(9 + 2 * task) for task in range(tasks)], dtype=torch.float64)
    return B @ A * scale[:, None, None]


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative Frobenius error."""
    return float(torch.linalg.norm(actual.double() - expected.double()) / torch.linalg.norm(expected.double()))
