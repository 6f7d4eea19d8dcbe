"""Dropping entries at random."""

from __future__ import annotations

import torch

from acemerge.numerics.dropping import drop
from elementwise_cases import random_tasks


def test_drop_leaves_its_input_alone() -> None:
    tau = random_tasks(1, 5, 5)[0]
    before = tau.clone()
    for rescale in ("inverse", "l1", "none"):
        drop(tau, 0.5, rescale, torch.Generator().manual_seed(0))
    assert tau.equal(before)
