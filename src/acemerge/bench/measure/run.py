"""Merge and measure: every candidate, for every seed, each result kept so that an interrupted bench goes on where it stopped."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from acemerge.bench.data.task import Task
from acemerge.bench.measure.evaluation import Part
from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.measured_merge import MergeReport, measured_merge
from acemerge.bench.measure.metrics import Accuracy, Estimate
from acemerge.bench.measure.side_by_side import run_side_by_side
from acemerge.bench.suites.registry import Suite
from acemerge.cache import cache_folder
from acemerge.calibration.registry import measurement_of
from acemerge.checkpoints.content_hash import named_sha256
from acemerge.checkpoints.families import is_task_head
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.methods import get_method
from acemerge.methods.registry import Uses
from acemerge.output.task_models import export_expert
from acemerge.output.whole_files import replace_file
from acemerge.version import __version__


@dataclass(frozen=True)
class Candidate:
    """Something to measure: the base, the experts, a merge, or a model that is there already."""

    label: str
    request: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `acemerge.merge`: the method, its options, orientation and so on."""
    chosen: str = "fixed"
    """Whether the hyper-parameters are fixed, or how they were chosen."""
    model: Path | None = None
    """A model to be measured as it is. Without this and a request: the experts themselves."""

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
    limit: int | None
    part: Part = "test"

    @property
    def needs_experts(self) -> bool:
        """Not a model that is measured as it is."""
        model = self.candidate.model
        return model is None or (self.suite.own_heads and not has_heads(model))

    @property
    def file(self) -> Path:
        """Where its result is kept. Anything that changes the result changes the name, the method's own source included."""
        method = self.candidate.method
        what = [self.suite.name, self.candidate.full_request(), self.seed, self.limit, self.part]
        made_by: list[Any] = [__version__, _source(method)]
        if self.needs_experts or self.suite.between_experts:
            made_by.append(self.suite.experts(self.seed).identity(self.suite.tasks))
        if self.candidate.model is not None:
            tasks = [[task.name, task.source, task.metric] for task in self.suite.tasks]
            made_by += [tasks, model_hashes(self.candidate.model)]
        digest = hashlib.sha256(json.dumps([what, made_by], sort_keys=True).encode()).hexdigest()[:16]
        kind = method or ("model" if self.candidate.model else EXPERTS.label)
        return cache_folder() / "scores" / self.suite.name / f"{kind}-{self.seed}-{digest}.json"


@dataclass(frozen=True)
class Result:
    """What a job found."""

    seed: int
    scores: Mapping[str, Accuracy | Estimate]
    merge: MergeReport | None
    """None for the experts themselves."""

    @property
    def average(self) -> float:
        """Mean score over tasks."""
        return sum(score.share for score in self.scores.values()) / len(self.scores)


@cache
def _source(method: str | None) -> str:
    if method is None:
        return ""
    functions = [get_method(method).kernel, *([measurement_of(method)] if get_method(method).uses == "data" else [])]
    sources = [inspect.getsource(sys.modules[function.__module__]) for function in functions]
    return hashlib.sha256("".join(sources).encode()).hexdigest()


@cache
def model_hashes(model: Path) -> dict[str, str]:
    """sha256 of every file of weights by its name, of heads and of tasks' parts too."""
    hashes = {file.name: named_sha256(file) for file in open_checkpoint(model, model.name).files}
    beside = sorted(model.glob("*/**/*.safetensors")) if model.is_dir() else []
    return hashes | {str(file.relative_to(model)): named_sha256(file) for file in beside}


def measure_all(jobs: Sequence[Job], say: Say, workers: int | None = None) -> list[Result]:
    """Every job's result, from the kept ones or measured now, side by side where the suite says so."""
    left = list({job.file: job for job in jobs if not job.file.is_file()}.values())
    if left:
        _measure_anew(left, say, workers or left[0].suite.compute.workers)
    return [_read(job.file) for job in jobs]


def _measure_anew(left: Sequence[Job], say: Say, workers: int) -> None:
    models = "1 model" if len(left) == 1 else f"{len(left)} models"
    say(f"{models} to merge and evaluate; what is done is kept if you interrupt this")
    started = time.monotonic()
    for done, (index, result) in enumerate(run_side_by_side(measure, [(job,) for job in left], workers), 1):
        job = left[index]
        merging = f", merged in {result.merge.seconds:.1f} s" if result.merge else ""
        say(
            f"{done}/{len(left)} {job.candidate.label} (seed {job.seed}, {job.part}): {100 * result.average:.1f}%{merging}; "
            f"{time.monotonic() - started:.0f} s so far"
        )


def measure(job: Job) -> Result:
    """Merge, evaluate task by task with each expert's own head, keep the result."""
    unfinished = Unfinished(job.file.with_suffix(".unfinished"))
    report, scores = _make_model(job, unfinished), unfinished.scores
    unfinished.keep(report, scores)
    for task in job.suite.tasks:
        if task.name not in scores:
            folder = _model_for(job, task, unfinished.folder)
            scores[task.name] = job.suite.judge(job.suite, folder, task, job.part, job.limit, job.seed)
            unfinished.keep(report, scores)
            if job.suite.given is not None:
                job.suite.compute.tell(f"{job.candidate.label}, {task.name}: {100 * scores[task.name].share:.2f}")
    own_merge = report if job.candidate.model is None else None  # lending heads is no merge
    result = Result(job.seed, {task.name: scores[task.name] for task in job.suite.tasks}, own_merge)
    _write(job, result)
    shutil.rmtree(unfinished.folder)
    return result


def _make_model(job: Job, unfinished: Unfinished) -> MergeReport | None:
    """Merge into the job's folder, if there is something to merge and it was not done before the interruption."""
    suite, candidate = job.suite, job.candidate
    merged = unfinished.folder / "merged"
    base, request = suite.experts(job.seed).base, {**suite.merge, **candidate.request}
    if candidate.model is not None:
        if not job.needs_experts:
            return None
        base, request = candidate.model, {**suite.merge, **BASE.request}  # adds nothing but the experts' heads
    elif not candidate.request:
        return None
    if candidate.uses == "data":
        request["data"] = suite
    if unfinished.report is None or not merged.is_dir():
        return measured_merge(base, suite.folders(job.seed), merged, request, suite.compute)
    return unfinished.report


def has_heads(model: Path) -> bool:
    """Whether a model has a head, or the heads of a merge's experts beside it."""
    beside = model.is_dir() and ((model / "heads").is_dir() or (model / "tasks").is_dir())
    return beside or any(is_task_head(name) for name in open_checkpoint(model, model.name).tensors)


def _model_for(job: Job, task: Task, place: Path) -> Path:
    """The task's expert; or the merged model, or the given one, with what belongs to that expert put back on it."""
    merged = place / "merged"
    model = merged if merged.is_dir() else job.candidate.model
    if model is None:
        return job.suite.experts(job.seed).folder(task)
    if not any((model / kind / task.expert).is_dir() for kind in ("heads", "tasks")):
        return model
    return export_expert(model, task.expert, place / "task", overwrite=True)


class Unfinished:
    """The folder of a job under way: the merged model, and the scores so far."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._file = folder, folder / "scores.json"
        record = json.loads(self._file.read_text(encoding="utf-8")) if self._file.is_file() else {"scores": {}, "merge": None}
        self.scores = _scores(record["scores"])
        self.report = MergeReport(**record["merge"]) if record["merge"] else None

    def keep(self, report: MergeReport | None, scores: Mapping[str, Accuracy | Estimate]) -> None:
        """For the next run, should this one be interrupted."""
        record = {"scores": {task: asdict(score) for task, score in scores.items()}, "merge": asdict(report) if report else None}
        _replace_text(self._file, json.dumps(record, indent=1) + "\n")


def _scores(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Accuracy | Estimate]:
    return {task: Accuracy(**score) if "right" in score else Estimate(**score) for task, score in stored.items()}


def _replace_text(file: Path, text: str) -> None:
    with replace_file(file) as staged:
        staged.write_text(text, encoding="utf-8")


def _write(job: Job, result: Result) -> None:
    about = {"suite": job.suite.name, "request": dict(job.candidate.request), "limit": job.limit, "part": job.part}
    _replace_text(job.file, json.dumps({**about, "result": asdict(result)}, indent=1) + "\n")


def _read(file: Path) -> Result:
    stored = json.loads(file.read_text(encoding="utf-8"))["result"]
    return Result(stored["seed"], _scores(stored["scores"]), MergeReport(**stored["merge"]) if stored["merge"] else None)
