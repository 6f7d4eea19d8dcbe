"""Random task vectors and inputs, in float64, for tests of methods that use data."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 10_000)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_grams(tasks: int, n: int, seed: int, rows: int | None = None) -> list[Tensor]:
    return [x.T @ x / len(x) for x in random(tasks, rows or 4 * n + 3, n, seed=seed)]
