"""Metrics: what a task's answers are worth, with a standard error. All are shares of 1; tables show percent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Metric = Literal["accuracy", "matthews", "accuracy_and_f1", "pearson_and_spearman", "loss"]
"""All but the loss are of answers and labels; that is of every token of a text (`next_token.py`)."""
Numbers = NDArray[Any]

GROUPS = 20
"""Of the jackknife that gives the standard error of what is no accuracy."""


class Score(Protocol):
    """How well a model does a task."""

    @property
    def share(self) -> float:
        """1 is perfect."""

    @property
    def variance(self) -> float:
        """Of the share, as an estimate from so many rows."""


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


@dataclass(frozen=True)
class Estimate:
    """Any other metric."""

    metric: str
    share: float
    standard_error: float
    rows: int
    others: Mapping[str, float] | None = None
    """What else was measured on the same answers, by name."""

    @property
    def variance(self) -> float:
        """Of the share."""
        return self.standard_error**2


def score_answers(metric: Metric, labels: Numbers, answers: Numbers) -> Accuracy | Estimate:
    """The metric of a task's answers: classes, or numbers for a regression."""
    if metric == "accuracy":
        return Accuracy(int((labels == answers).sum()), len(labels))
    return Estimate(metric, measure(metric, labels, answers), _standard_error(metric, labels, answers), len(labels))


def measure(metric: Metric, labels: Numbers, answers: Numbers) -> float:
    """One number, by scikit-learn or scipy.

    >>> measure("accuracy_and_f1", np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]))
    0.7083333333333333
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if metric == "accuracy":
        return float(accuracy_score(labels, answers))
    if metric == "accuracy_and_f1":
        return statistics.fmean([accuracy_score(labels, answers), f1_score(labels, answers, zero_division=0.0)])
    if np.ptp(labels) == 0 or np.ptp(answers) == 0:
        return 0.0  # what is always the same goes along with nothing
    return float(matthews_corrcoef(labels, answers)) if metric == "matthews" else _mean_correlation(labels, answers)


def _mean_correlation(labels: Numbers, answers: Numbers) -> float:
    """The mean of Pearson's and Spearman's."""
    from scipy.stats import pearsonr, spearmanr

    return statistics.fmean([float(pearsonr(labels, answers).statistic), float(spearmanr(labels, answers).statistic)])


def _standard_error(metric: Metric, labels: Numbers, answers: Numbers) -> float:
    """By the delete-a-group jackknife: how much the metric changes when one of some groups of rows is left out."""
    groups = np.random.default_rng(0).permutation(len(labels)) % GROUPS
    without = [measure(metric, labels[groups != group], answers[groups != group]) for group in range(GROUPS)]
    return math.sqrt((GROUPS - 1) * statistics.pvariance(without))
