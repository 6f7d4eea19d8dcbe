"""Rows in batches that cost little padding."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

_BATCH_TOKENS = 2048
"""Rows times length of a batch: enough for full speed on one core, and little memory."""
_BATCH_ROWS = 64


def batches_of_like_length(lengths: Tensor, batch_size: int | None = None) -> Iterator[Tensor]:
    """Every row once, short ones first: padding costs as much as text."""
    tokens = _BATCH_TOKENS if batch_size is None else sys.maxsize
    batch: list[int] = []
    for row in lengths.argsort(stable=True).tolist():
        if batch and (len(batch) == (batch_size or _BATCH_ROWS) or (len(batch) + 1) * int(lengths[row]) > tokens):
            yield torch.tensor(batch)
            batch = []
        batch.append(row)
    if batch:
        yield torch.tensor(batch)
