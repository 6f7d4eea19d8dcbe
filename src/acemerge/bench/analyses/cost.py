"""What merging costs: time and memory of each method on the same models, one merge at a time."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.measured_merge import measured_merge
from acemerge.bench.suites.registry import Suite
from acemerge.bench.tables.paper import paper_tables

REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """Of one method, on one thread, or on all of them and its device for a suite that has a machine to itself."""

    method: str
    seconds: float
    """The median of the repeats."""
    peak_bytes: int | None
    """The largest of the repeats."""


def measure_costs(suite: Suite, methods: Sequence[str], say: Say) -> list[Cost]:
    """Merge the experts of seed 0 by each method, in turns, so that whatever else the machine does falls on all alike."""
    suite.prepare([0], say)
    base, folders = suite.experts(0).base, suite.folders(0)
    reports: dict[str, list[Any]] = {method: [] for method in methods}
    for repeat in range(REPEATS):
        for method in methods:
            with tempfile.TemporaryDirectory(prefix="acemerge-bench-") as place:
                report = measured_merge(base, folders, Path(place) / "merged", {**suite.merge, "method": method}, suite.compute)
            reports[method].append(report)
            say(f"{repeat + 1}/{REPEATS} {method}: {report.seconds:.1f} s")
    return [
        Cost(
            method, statistics.median(r.seconds for r in found), max((r.peak_bytes for r in found if r.peak_bytes), default=None)
        )
        for method, found in reports.items()
    ]


def cost_table(costs: Sequence[Cost], suite: str) -> list[list[str]]:
    """A heading and a line for each method, cheapest first; times also as a ratio to ACE's where that was measured.

    The paper's times, on a GPU of theirs, stand beside ours where it has them.
    """
    by_name = {cost.method: cost.seconds for cost in costs}
    theirs = paper_tables().get(suite, {}).get("cost", {})
    lines = [["method", "seconds", "of ace", "peak MB", *(["paper: seconds", "paper: peak GB"] if theirs else [])]]
    for cost in sorted(costs, key=lambda cost: cost.seconds):
        ratio = f"{cost.seconds / by_name['ace']:.2f}" if "ace" in by_name else ""
        peak = "" if cost.peak_bytes is None else f"{cost.peak_bytes / 1e6:.0f}"
        paper = theirs.get(cost.method, {"seconds": "", "peak_gb": ""})
        beside = [str(paper["seconds"]), str(paper["peak_gb"])] if theirs else []
        lines.append([cost.method, f"{cost.seconds:.2f}", ratio, peak, *beside])
    return lines
