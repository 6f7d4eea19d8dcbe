"""Thresholds streamed over many tensors are exact order statistics, and shares are counted as written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.numerics.thresholds import MagnitudeThresholds, count_of_share, trim
from elementwise_references import exact_floor


@given(
    pieces=st.lists(
        st.lists(st.floats(-4, 4, width=16) | st.floats(width=32, allow_nan=False), max_size=9), min_size=1, max_size=4
    ),
    keep=st.floats(0.01, 0.99),
)
def test_streamed_thresholds_are_the_exact_order_statistic(pieces: list[list[float]], keep: float) -> None:
    thresholds = MagnitudeThresholds(keep)
    passes = 1
    for piece in pieces:
        thresholds.observe(torch.tensor([piece], dtype=torch.float32), ["a"])
    while thresholds.end_pass():
        passes += 1
        for piece in pieces:
            thresholds.observe(torch.tensor([piece], dtype=torch.float32), ["a"])
    values = sorted(abs(x) for piece in pieces for x in piece)
    assert passes == 2
    if values:
        assert thresholds.threshold("a") == values[len(values) - exact_floor(len(values), keep) - 1]
        c = thresholds.threshold("a")
        assert sum(value >= c for value in values) >= exact_floor(len(values), keep) + 1
        for piece in pieces:
            expected = [x if abs(x) >= c else 0.0 for x in piece]
            assert trim(torch.tensor(piece, dtype=torch.float32), c).tolist() == expected
            assert trim(torch.tensor(piece, dtype=torch.float64), c).tolist() == expected
    else:
        assert thresholds.threshold("a") == 0


def test_streamed_thresholds_know_experts_apart() -> None:
    thresholds = MagnitudeThresholds(0.5)
    tensors = [(torch.tensor([[1.0, 2.0], [10.0, 20.0]]), ["a", "b"]), (torch.tensor([[3.0, 4.0]]), ["b"])]
    more = True
    while more:
        for task_vectors, experts in tensors:
            thresholds.observe(task_vectors, experts)
        more = thresholds.end_pass()
    assert (thresholds.threshold("a"), thresholds.threshold("b")) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("size", "share", "count"), [(100, 0.29, 29), (10, 0.7, 7), (3, 1.0, 3), (9, 0.1, 0), (10**10, 0.57, 57 * 10**8)]
)
def test_shares_are_counted_as_written(size: int, share: float, count: int) -> None:
    assert count_of_share(size, share) == count
