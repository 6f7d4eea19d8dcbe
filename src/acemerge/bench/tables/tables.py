"""Results as a table: rows are the base, the experts and every merge; the same numbers as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any

from acemerge.bench.measure.run import EXPERTS, Candidate, Result
from acemerge.bench.tables.paper import PaperRow
from acemerge.methods import get_method


@dataclass(frozen=True)
class Row:
    """One candidate over all seeds."""

    candidate: Candidate
    results: tuple[Result, ...]
    experts: tuple[Result, ...] | None
    """The experts of the same seeds, measured in the same run on the same rows; none where they were not asked for."""
    paper: PaperRow | None = None
    """What the paper reports for it."""

    @property
    def tasks(self) -> list[str]:
        """In the suite's order."""
        return list(self.results[0].scores)

    def score(self, task: str) -> float:
        """Mean over seeds."""
        return statistics.fmean(result.scores[task].share for result in self.results)

    def share_of_expert(self, task: str) -> float:
        """Mean over seeds of the share of the expert's score that is left; not a number without experts."""
        if self.experts is None:
            return math.nan
        pairs = zip(self.results, self.experts, strict=True)
        return statistics.fmean(_ratio(r.scores[task].share, e.scores[task].share) for r, e in pairs)

    @property
    def average(self) -> float:
        """Mean over tasks and seeds."""
        return statistics.fmean(result.average for result in self.results)

    @property
    def normalised(self) -> float:
        """Mean over tasks and seeds of the share of the expert's score that is left."""
        return statistics.fmean(map(self.share_of_expert, self.tasks))

    @property
    def standard_error(self) -> float:
        """Of the average. Test rows are the same for every seed, so more seeds make only the second term smaller."""
        by_rows = statistics.fmean(sum(score.variance for score in result.scores.values()) for result in self.results)
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
        return self.candidate.label == EXPERTS.label or (method is not None and get_method(method).per_task)

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
            "scores": {task: self.score(task) for task in self.tasks},
            "share_of_expert": {task: self.share_of_expert(task) for task in self.tasks},
            "average": self.average,
            "normalised_average": self.normalised,
            "standard_error": self.standard_error,
            "merge_seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "paper": self.paper,
            "seeds": [
                {"seed": r.seed, "scores": {task: asdict(score) for task, score in r.scores.items()}} for r in self.results
            ],
        }


def _ratio(score: float, expert: float) -> float:
    """An expert that scores nothing leaves nothing to be compared with."""
    return score / expert if expert else math.nan


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
    normalised: bool = False
    """Whether people also see each score as a share of the expert's."""
    others: Mapping[str, PaperRow] = field(default_factory=dict)
    """Rows of the paper that nothing of this run is called as."""

    def to_json(self) -> str:
        """For programs."""
        content = {"title": self.title, **self.about, "rows": [row.to_json() for row in self.rows]}
        return json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n"

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
            shares = [*(row.score(task) for task in tasks), row.average, row.normalised, row.standard_error]
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
        about = "\n".join(f"- {name.replace('_', ' ')}: {_in_words(value)}" for name, value in self.about.items())
        shared = [*reference, *self._in_order(single)]
        parts = [f"# {self.title}", about, as_markdown(as_cells(shared, self.others))]
        if self.normalised:
            parts += ["In percent of the expert's score:", as_markdown(as_normalised_cells(shared, self.others))]
        if per_task:
            parts += ["One model per task, made from shared parts, which is easier than one merged model:"]
            parts += [as_markdown(as_cells(self._in_order(per_task)))]
        merges = [row for row in others if row.hyper_parameters]
        if merges:
            settings = [f"- {row.candidate.label}: {row.hyper_parameters} ({row.candidate.chosen})" for row in merges]
            parts += ["Hyper-parameters:", "\n".join(settings)]
        return "\n\n".join(parts) + "\n"

    def _in_order(self, rows: Sequence[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: -row.average) if self.ranked else list(rows)


def _known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _without_nan(value: Any) -> Any:
    """JSON has no word for what is not a number."""
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _in_words(value: Any) -> str:
    return f"`{json.dumps(value)}`" if isinstance(value, Mapping) else str(value)


def as_cells(rows: Sequence[Row], others: Mapping[str, PaperRow] | None = None) -> list[list[str]]:
    """A heading and a line for each row, in percent, seconds and megabytes; the paper's scores on a line of their own.

    What no row has, such as the cost of a merge that was done elsewhere, is no column.
    """
    tasks = rows[0].tasks
    cells = [["model", *tasks, "average", "±", "of experts", "merge s", "peak MB"]]
    for row in rows:
        shares = [*(row.score(task) for task in tasks), row.average, row.standard_error, row.normalised]
        peak = None if row.peak_bytes is None else row.peak_bytes / 1e6
        cost = [_known(row.seconds, ".1f"), _known(peak, ".0f")]
        cells.append([_label(row), *map(_percent, shares), *cost])
        cells += _paper_line("  in the paper", row.paper, "raw", tasks, 4)
    return _without_empty_columns([*cells, *_other_lines(others, "raw", tasks, 4)])


def _without_empty_columns(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    filled = [any(column) for column in zip(*cells[1:], strict=True)]
    return [list(compress(line, filled)) for line in cells]


def _label(row: Row) -> str:
    return f"{row.candidate.label} (uses data)" if row.candidate.uses == "data" else row.candidate.label


def as_normalised_cells(rows: Sequence[Row], others: Mapping[str, PaperRow] | None = None) -> list[list[str]]:
    """The same in percent of each expert's score."""
    tasks = rows[0].tasks
    cells = [["model", *tasks, "average"]]
    for row in rows:
        cells.append([_label(row), *(_percent(row.share_of_expert(task)) for task in tasks), _percent(row.normalised)])
        cells += _paper_line("  in the paper", row.paper, "normalised", tasks, 0)
    return [*cells, *_other_lines(others, "normalised", tasks, 0)]


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.1f}"


def _paper_line(label: str, row: PaperRow | None, kind: str, tasks: Sequence[str], blanks: int) -> list[list[str]]:
    theirs = (row or {}).get(kind)
    if not theirs:
        return []
    return [[label, *(_known(theirs.get(name), ".1f") for name in (*tasks, "average")), *[""] * blanks]]


def _other_lines(others: Mapping[str, PaperRow] | None, kind: str, tasks: Sequence[str], blanks: int) -> list[list[str]]:
    return [line for name, row in (others or {}).items() for line in _paper_line(f"paper: {name}", row, kind, tasks, blanks)]


def as_markdown(cells: Sequence[Sequence[str]]) -> str:
    """A heading and lines as a Markdown table."""
    heading, *lines = cells
    ruler = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, ruler, *lines])
