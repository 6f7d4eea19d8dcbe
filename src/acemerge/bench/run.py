"""Merge and measure: every candidate, for every seed, each result kept so that an interrupted bench goes on where it stopped."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import acemerge
from acemerge.bench.domain import Prepared
from acemerge.bench.evaluation import Accuracy, evaluate
from acemerge.bench.experts import TRAINED, Experts, Say
from acemerge.bench.measured_merge import MergeReport, measured_merge
from acemerge.bench.packages import cache_folder
from acemerge.bench.side_by_side import WORKERS, run_side_by_side
from acemerge.bench.suites import Suite
from acemerge.methods import get_method
from acemerge.methods.registry import Uses

Part = Literal["test", "validation"]


@dataclass(frozen=True)
class Candidate:
    """Something to measure: the base, the experts, or a merge."""

    label: str
    request: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `acemerge.merge`: the method, its options, orientation and so on. Empty: the experts themselves."""
    chosen: str = "fixed"
    """Whether the hyper-parameters are fixed, or how they were chosen."""

    @property
    def method(self) -> str | None:
        """The merging method, if it is a merge."""
        return self.request.get("method")

    @property
    def uses(self) -> Uses:
        """Whether it is made from weights alone, or from training rows of the tasks too."""
        return get_method(self.method).uses if self.method else "weights"

    def full_request(self) -> dict[str, Any]:
        """The request with the method's defaults written out: what asks for the same is the same."""
        if self.method is None:
            return {}
        method = get_method(self.method)
        known = {option.name for option in method.describe_options()}
        options = method.options({name: value for name, value in self.request.items() if name in known})
        return {**self.request, **asdict(options)}


BASE = Candidate("base", {"method": "average", "alpha": 0.0})
"""A merge that adds nothing: the base under each expert's head, by the same path as all others."""
EXPERTS = Candidate("experts")


@dataclass(frozen=True)
class Job:
    """One candidate, for one seed, on so many rows of each task."""

    suite: Suite
    candidate: Candidate
    seed: int
    limit: int
    part: Part = "test"

    @property
    def file(self) -> Path:
        """Where its result is kept. Anything that changes the result changes the name, the method's own source included."""
        method = self.candidate.method
        what = [self.suite.name, self.candidate.full_request(), self.seed, self.limit, self.part]
        made_by = [acemerge.__version__, _source(method), _training(self.suite, self.seed)]
        digest = hashlib.sha256(json.dumps([what, made_by], sort_keys=True).encode()).hexdigest()[:16]
        return cache_folder() / "results" / self.suite.name / f"{method or EXPERTS.label}-{self.seed}-{digest}.json"


@dataclass(frozen=True)
class Result:
    """What a job found."""

    seed: int
    accuracy: Mapping[str, Accuracy]
    merge: MergeReport | None
    """None for the experts themselves."""

    @property
    def average(self) -> float:
        """Mean accuracy over tasks."""
        return sum(accuracy.share for accuracy in self.accuracy.values()) / len(self.accuracy)


@cache
def _source(method: str | None) -> str:
    if method is None:
        return ""
    module = inspect.getmodule(get_method(method).kernel)
    assert module is not None
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()


def _training(suite: Suite, seed: int) -> list[dict[str, Any]]:
    """How the experts were trained."""
    experts = Experts(suite.domain, seed)
    records = [json.loads((experts.folder(task) / TRAINED).read_text(encoding="utf-8")) for task in suite.tasks]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def measure_all(jobs: Sequence[Job], say: Say, workers: int = WORKERS) -> list[Result]:
    """Every job's result, from the kept ones or measured now, two at a time."""
    left = list({job.file: job for job in jobs if not job.file.is_file()}.values())
    if left:
        _measure_anew(left, say, workers)
    return [_read(job.file) for job in jobs]


def _measure_anew(left: Sequence[Job], say: Say, workers: int) -> None:
    say(f"{len(left)} models to merge and evaluate; what is done is kept if you interrupt this")
    started = time.monotonic()
    for done, (index, result) in enumerate(run_side_by_side(measure, [(job,) for job in left], workers), 1):
        job = left[index]
        merging = f", merged in {result.merge.seconds:.1f} s" if result.merge else ""
        say(
            f"{done}/{len(left)} {job.candidate.label} (seed {job.seed}, {job.part}): {100 * result.average:.1f}%{merging}; "
            f"{time.monotonic() - started:.0f} s so far"
        )


def measure(job: Job) -> Result:
    """Merge, evaluate with each expert's own head, keep the result."""
    suite = job.suite
    experts = Experts(suite.domain, job.seed)
    folders = {task.name: experts.folder(task) for task in suite.tasks}
    with tempfile.TemporaryDirectory(prefix="acemerge-bench-") as temporary:
        place = Path(temporary)
        report = None
        if job.candidate.request:
            data = {"data": suite} if job.candidate.uses == "data" else {}
            report = measured_merge(experts.base, folders, place / "merged", {**job.candidate.request, **data})
        accuracy = {}
        for name, folder in folders.items():
            if report is not None:
                folder = acemerge.export_expert(place / "merged", name, place / "task", overwrite=True)
            accuracy[name] = evaluate(suite.domain, suite.domain.load(folder), _rows(job, name))
        result = Result(job.seed, accuracy, report)
    _write(job, result)
    return result


_prepared: dict[tuple[str, str, int, Part], Prepared] = {}


def _rows(job: Job, task: str) -> Prepared:
    """Made ready once in each process."""
    key = (job.suite.domain.name, task, job.limit, job.part)
    if key not in _prepared:
        splits = next(t for t in job.suite.tasks if t.name == task).load()
        rows = splits.test if job.part == "test" else splits.validation
        _prepared[key] = job.suite.domain.prepare(rows.first(job.limit))
    return _prepared[key]


def _write(job: Job, result: Result) -> None:
    job.file.parent.mkdir(parents=True, exist_ok=True)
    staged = job.file.with_suffix(f".{os.getpid()}.partial")
    about = {"suite": job.suite.name, "request": dict(job.candidate.request), "limit": job.limit, "part": job.part}
    record = {**about, "result": asdict(result)}
    staged.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    staged.replace(job.file)


def _read(file: Path) -> Result:
    stored = json.loads(file.read_text(encoding="utf-8"))["result"]
    accuracy = {name: Accuracy(**counts) for name, counts in stored["accuracy"].items()}
    return Result(stored["seed"], accuracy, MergeReport(**stored["merge"]) if stored["merge"] else None)
