"""Metrics and their standard errors."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from acemerge.bench.measure.metrics import Accuracy, Estimate, score_answers


def test_standard_errors_match_the_spread_over_samples() -> None:
    """Of an accuracy by its formula, and of other metrics about as wide as they really scatter."""
    generator = np.random.default_rng(0)
    found, spread = [], []
    for _ in range(20):
        labels = generator.integers(2, size=400)
        answers = np.where(generator.random(400) < 0.8, labels, 1 - labels)
        score = score_answers("matthews", labels, answers)
        assert isinstance(score, Estimate)
        found.append(score.share)
        spread.append(score.standard_error)
    assert statistics.fmean(spread) == pytest.approx(statistics.stdev(found), rel=0.25)
    assert score_answers("accuracy", np.array([1, 0, 1]), np.array([1, 1, 1])) == Accuracy(2, 3)
    assert score_answers("pearson_and_spearman", np.arange(50.0), np.zeros(50)).share == 0.0
    assert score_answers("matthews", np.ones(50), np.ones(50)).share == 0.0
