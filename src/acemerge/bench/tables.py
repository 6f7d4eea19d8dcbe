"""Results as a table: rows are the base, the experts and every merge; the same numbers as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acemerge.bench.run import EXPERTS, Candidate, Result
from acemerge.methods import get_method


@dataclass(frozen=True)
class Row:
    """One candidate over all seeds."""

    candidate: Candidate
    results: tuple[Result, ...]
    experts: tuple[Result, ...]
    """The experts of the same seeds, measured in the same run on the same rows."""

    @property
    def tasks(self) -> list[str]:
        """In the suite's order."""
        return list(self.results[0].accuracy)

    def accuracy(self, task: str) -> float:
        """Mean over seeds."""
        return statistics.fmean(result.accuracy[task].share for result in self.results)

    @property
    def average(self) -> float:
        """Mean over tasks and seeds."""
        return statistics.fmean(result.average for result in self.results)

    @property
    def normalised(self) -> float:
        """Mean over tasks and seeds of the share of the expert's accuracy that is left."""
        pairs = zip(self.results, self.experts, strict=True)
        return statistics.fmean(r.accuracy[t].share / e.accuracy[t].share for r, e in pairs for t in self.tasks)

    @property
    def standard_error(self) -> float:
        """Of the average. Test rows are the same for every seed, so more seeds make only the second term smaller."""
        by_rows = statistics.fmean(sum(a.variance for a in result.accuracy.values()) for result in self.results)
        by_seeds = statistics.variance(r.average for r in self.results) / len(self.results) if len(self.results) > 1 else 0.0
        return math.sqrt(by_rows / len(self.tasks) ** 2 + by_seeds)

    @property
    def seconds(self) -> float | None:
        """Of a merge, the median over seeds."""
        costs = [result.merge.seconds for result in self.results if result.merge]
        return statistics.median(costs) if costs else None

    @property
    def peak_bytes(self) -> int | None:
        """Of a merge, the largest over seeds."""
        reports = [result.merge for result in self.results if result.merge]
        peaks = [report.peak_bytes for report in reports if report.peak_bytes is not None]
        return max(peaks, default=None)

    @property
    def per_task(self) -> bool:
        """Whether it is one model per task, not one merged model."""
        method = self.candidate.method
        return method is None or get_method(method).per_task

    @property
    def hyper_parameters(self) -> str:
        """Everything that was set, defaults included, and how."""
        report = self.results[0].merge
        if report is None:
            return ""
        beyond = {k: v for k, v in self.candidate.request.items() if k != "method" and k not in report.options}
        return ", ".join(f"{name}={_compact(value)}" for name, value in {**report.options, **beyond}.items())

    def to_json(self) -> dict[str, Any]:
        """All there is to know, the counts of every seed included."""
        return {
            "row": self.candidate.label,
            "request": dict(self.candidate.request),
            "hyper_parameters": self.hyper_parameters,
            "chosen": self.candidate.chosen,
            "per_task": self.per_task,
            "uses": self.candidate.uses,
            "accuracy": {task: self.accuracy(task) for task in self.tasks},
            "average": self.average,
            "normalised_average": self.normalised,
            "standard_error": self.standard_error,
            "merge_seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "seeds": [
                {"seed": r.seed, "right": {task: [a.right, a.rows] for task, a in r.accuracy.items()}} for r in self.results
            ],
        }


def _compact(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Table:
    """The rows of one run, and what it was a run of."""

    title: str
    about: Mapping[str, Any]
    """Suite, seeds, rows, versions: what is needed to repeat it."""
    rows: tuple[Row, ...]
    ranked: bool = True
    """Whether people see the best first; an analysis has an order of its own."""

    def to_json(self) -> str:
        """For programs."""
        return json.dumps({"title": self.title, **self.about, "rows": [row.to_json() for row in self.rows]}, indent=1) + "\n"

    def to_csv(self) -> str:
        """For spreadsheets; shares between 0 and 1."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        tasks = self.rows[0].tasks
        writer.writerow(
            ["row", *tasks, "average", "normalised_average", "standard_error", "merge_seconds", "peak_bytes", "per_task",
             "uses", "hyper_parameters", "chosen"]
        )  # fmt: skip
        for row in self.rows:
            shares = [*(row.accuracy(task) for task in tasks), row.average, row.normalised, row.standard_error]
            cost = [_known(row.seconds, ".2f"), _known(row.peak_bytes, "d")]
            rest = [row.per_task, row.candidate.uses, row.hyper_parameters, row.candidate.chosen]
            writer.writerow([row.candidate.label, *(f"{share:.5f}" for share in shares), *cost, *rest])
        return text.getvalue()

    def to_markdown(self) -> str:
        """For people: models with something of each task's own are apart."""
        reference = [row for row in self.rows if row.candidate.label in ("base", EXPERTS.label)]
        others = [row for row in self.rows if row not in reference]
        single = [row for row in others if not row.per_task]
        per_task = [row for row in others if row.per_task]
        about = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in self.about.items())
        parts = [f"# {self.title}", about, _markdown([*reference, *self._in_order(single)])]
        if per_task:
            parts += ["One model per task, made from shared parts, which is easier than one merged model:"]
            parts += [_markdown(self._in_order(per_task))]
        settings = [f"- {row.candidate.label}: {row.hyper_parameters} ({row.candidate.chosen})" for row in others]
        return "\n\n".join([*parts, "Hyper-parameters:", "\n".join(settings)]) + "\n"

    def _in_order(self, rows: Sequence[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: -row.average) if self.ranked else list(rows)


def _known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def as_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A heading and a line for each row, in percent, seconds and megabytes."""
    tasks = rows[0].tasks
    cells = [["model", *tasks, "average", "±", "of experts", "merge s", "peak MB"]]
    for row in rows:
        shares = [*(row.accuracy(task) for task in tasks), row.average, row.standard_error, row.normalised]
        peak = None if row.peak_bytes is None else row.peak_bytes / 1e6
        cost = [_known(row.seconds, ".1f"), _known(peak, ".0f")]
        label = f"{row.candidate.label} (uses data)" if row.candidate.uses == "data" else row.candidate.label
        cells.append([label, *(f"{100 * share:.1f}" for share in shares), *cost])
    return cells


def _markdown(rows: Sequence[Row]) -> str:
    return as_markdown(as_cells(rows))


def as_markdown(cells: Sequence[Sequence[str]]) -> str:
    """A heading and lines as a Markdown table."""
    heading, *lines = cells
    ruler = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, ruler, *lines])
