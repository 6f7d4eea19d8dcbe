"""Accuracy of a model on a task's rows, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acemerge.bench.domain import Domain, Prepared

_BATCH_TOKENS = 2048
"""Rows times length of a batch: enough for full speed on one core, and little memory."""
_BATCH_ROWS = 64


@dataclass(frozen=True)
class Accuracy:
    """Right answers among rows."""

    right: int
    rows: int

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.right / self.rows

    @property
    def variance(self) -> float:
        """Of the share, as an estimate from so many rows."""
        return self.share * (1 - self.share) / self.rows

    @property
    def standard_error(self) -> float:
        """Of the share."""
        return math.sqrt(self.variance)


@torch.inference_mode()
def evaluate(domain: Domain, model: nn.Module, rows: Prepared) -> Accuracy:
    """How many rows the model answers rightly."""
    model.eval()
    right = 0
    for indices in batches_of_like_length(rows.lengths):
        answers = domain.logits(model, rows.batch(indices)).argmax(1)
        right += int((answers == rows.labels[indices]).sum())
    return Accuracy(right, len(rows.labels))


def batches_of_like_length(lengths: Tensor) -> Iterator[Tensor]:
    """Every row once, short ones first: padding costs as much as text."""
    batch: list[int] = []
    for row in lengths.argsort(stable=True).tolist():
        if batch and (len(batch) == _BATCH_ROWS or (len(batch) + 1) * int(lengths[row]) > _BATCH_TOKENS):
            yield torch.tensor(batch)
            batch = []
        batch.append(row)
    if batch:
        yield torch.tensor(batch)
