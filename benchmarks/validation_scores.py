"""How good a merged model is on validation rows of a suite, as `sweep` asks for it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import acemerge
from acemerge.bench.suites.registry import Suite


def validation_scores(suite: Suite, rows: int, merged: Path, settings: Mapping[str, Any]) -> dict[str, float]:  # noqa: ARG001
    """The mean of the tasks' accuracies on so many rows of each, and each task's own."""
    scores = {}
    for task in suite.tasks:
        with tempfile.TemporaryDirectory() as folder:
            model = acemerge.export_expert(merged, task.expert, Path(folder) / "model")
            scores[task.name] = suite.judge(suite, model, task, "validation", rows, 0).share
    return {"mean": statistics.fmean(scores.values()), **scores}
