"""Rows go through a model in batches."""

from __future__ import annotations

import torch

from acemerge.bench.measure.experts import shuffled_batches
from acemerge.calibration.batches import batches_of_like_length


def test_batches_hold_every_row_once() -> None:
    lengths = torch.randint(1, 60, (500,), generator=torch.Generator().manual_seed(0))
    for batches in (list(batches_of_like_length(lengths)), shuffled_batches(lengths, 16, torch.Generator().manual_seed(0))):
        assert sorted(torch.cat(batches).tolist()) == list(range(500))
