"""A sweep from its settings to its table: plans, one pass that writes every point's model, evaluation, what is kept.

Every point's folder is staged and published as a merge's is: absent or whole. sweep.json says what is done, so that the same
command goes on after an interruption, and a larger grid adds to a smaller one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acemerge.calibration.suite import Suite
from acemerge.checkpoints.source import expand_home
from acemerge.errors import InputError, PreflightError, did_you_mean
from acemerge.execute.pipeline import compute_threads, find_sources, make_plans, torch_device
from acemerge.methods import get_method
from acemerge.output.input_hashes import hashing_inputs
from acemerge.output.publishing import locked
from acemerge.output.staging import check_output, check_place, partial_folder, withdraw
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Recipe
from acemerge.sweeps.evaluation import Evaluate, checked_scores, describe_evaluation
from acemerge.sweeps.existing import holds_merge
from acemerge.sweeps.points import Point, check_distinct, make_points
from acemerge.sweeps.room import check_room, check_room_for_some, fitting_at_once, groups
from acemerge.sweeps.table import FIRST_SCORE, Objective, Record, Table, read_table
from acemerge.sweeps.writing import PointWriter

KEEP = ("best", "all", "none")


@dataclass(frozen=True)
class SweepPoint:
    """One point as it came out."""

    settings: Mapping[str, Any]
    folder: Path | None
    """Its model, if that was kept."""
    scores: Mapping[str, float | None]
    """Empty without an evaluation."""
    warnings: int


@dataclass(frozen=True)
class SweepResult:
    """What a sweep wrote and found, for the caller."""

    output: Path
    points: Sequence[SweepPoint]
    best: SweepPoint | None
    """By the objective, if the points were evaluated."""


def run_sweep(
    recipe: Recipe,
    settings: Mapping[str, Sequence[Any]],
    output: Path,
    *,
    evaluate: Evaluate | None = None,
    keep: str = "best",
    objective: Objective = FIRST_SCORE,
    at_once: int | None = None,
    relative_to: Path = Path(),
    device: str = "cpu",
    threads: int | None = None,
    resume: bool = True,
    overwrite: bool = False,
    offline: bool = False,
    verify: bool = False,
    force: bool = False,
    quiet: bool = True,
    suite: Suite | None = None,
) -> SweepResult:
    """Merge at every point of the grid into folders of `output`, and evaluate each, if asked to."""
    output = expand_home(output)
    for name, value in (("threads", threads), ("at_once", at_once)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: give at least one")
    if keep not in KEEP:
        own = "which models stay; a method's own keep is set like any option, --set keep=..., in Python options={'keep': ...}"
        raise InputError(f"keep={keep}: {did_you_mean(str(keep), KEEP)}; it says {own}")
    points = make_points(get_method(recipe.method), settings)
    check_place(output)
    table = read_table(output)
    sources = find_sources(recipe, relative_to, offline)
    check_place(output, [source.path for source in (sources.base, *sources.experts)])
    plans = make_plans([point.recipe(recipe) for point in points], sources, relative_to, suite)
    check_distinct(points, plans)
    names = [point.name for point in points]
    table.begin(output, names, recipe.method, recipe.options, (plans[0].base, *plans[0].experts))
    where = torch_device(device)
    with compute_threads(threads), hashing_inputs(plans[0], verify=verify) as hashes:
        writer = PointWriter(output, sources, where, hashes, resume=resume, overwrite=overwrite, quiet=quiet)
        sweep = _Sweep(points, plans, table, writer, evaluate, keep if evaluate else "all", objective)
        unfinished = sweep.find_unfinished()
        problems = sweep.check_room(unfinished, device, at_once)
        if problems and not force:
            raise PreflightError(problems)
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(output):
            sweep.run(unfinished, at_once)
    return sweep.result()


@dataclass
class _Sweep:
    """The work of a sweep, point by point; `table` is what is done."""

    points: Sequence[Point]
    plans: Sequence[Plan]
    table: Table
    writer: PointWriter
    evaluate: Evaluate | None
    keep: str
    objective: Objective
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [point.name for point in self.points]
        self.evaluation = describe_evaluation(self.evaluate) if self.evaluate else None

    # -- what there is to do

    def find_unfinished(self) -> list[int]:
        """The points without a model that is needed; refuses folders that hold something else."""
        unfinished = []
        for number, (name, plan) in enumerate(zip(self.names, self.plans, strict=True)):
            folder = self.writer.output / name
            there = folder.exists() and holds_merge(folder, plan, self.writer.hashes.all())
            if folder.exists() and not there:
                check_output(folder, self.writer.overwrite)
            if not there and (self.keep == "all" or not self._is_scored(number)):
                unfinished.append(number)
        return unfinished

    def _record(self, number: int) -> Record | None:
        record = self.table.points.get(self.names[number])
        return record if record and record.digest == self.plans[number].digest else None

    def _is_scored(self, number: int) -> bool:
        record = self._record(number)
        return record is not None and record.scores is not None and record.evaluation == self.evaluation

    def check_room(self, unfinished: Sequence[int], device: str, at_once: int | None) -> list[str]:
        """What is too small for it."""
        plans = [self.plans[number] for number in unfinished]
        if self.keep == "all":
            return check_room(self.writer.output, [self.names[number] for number in unfinished], plans, device)
        return check_room_for_some(self.writer.output, plans, device, at_once)

    # -- doing it

    def run(self, unfinished: Sequence[int], at_once: int | None) -> None:
        """Write and evaluate group by group; then see that what is to be kept is there, and nothing else."""
        output = self.writer.output
        output.mkdir(exist_ok=True)
        try:
            self._note_points(unfinished)
            finished = [number for number in range(len(self.points)) if number not in unfinished]
            for number in finished:
                with locked(output / self.names[number]):  # a kill may have left the lock of a point that is done
                    pass
            self._evaluate(finished)
            size = at_once or (len(self.points) if self.keep == "all" else fitting_at_once(output, self.plans))
            for group in groups(len(unfinished), size):
                chosen = [unfinished[index] for index in group]
                self._write(chosen)
                self._evaluate(chosen)
            self._keep_best()
        except BaseException:
            self.table.remove_if_empty(output)
            raise

    def _note_points(self, unfinished: Sequence[int]) -> None:
        """Before any work: a model that is written only to be evaluated must be known as such after a kill."""
        for number, point in enumerate(self.points):
            record = self._record(number) or Record(settings=dict(point.settings), digest=self.plans[number].digest)
            if record.evaluation != self.evaluation and self.evaluation:
                record.scores = None
            record.transient = self.keep != "all" and (record.transient or number in unfinished)
            self.table.points[point.name] = record
        self.table.best = self.table.best_of(self.names, self.objective) if self.evaluate else None
        self.table.write(self.writer.output)

    def _write(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        names = [self.names[number] for number in numbers]
        counts = self.writer.write(names, [self.plans[number] for number in numbers])
        for name, count in zip(names, counts, strict=True):
            self.table.points[name].warnings = count
        self.table.write(self.writer.output)

    def _evaluate(self, numbers: Sequence[int]) -> None:
        """Score these points, as far as they are not, and remove the models that only had to be scored."""
        for number in numbers:
            if self.evaluate and not self._is_scored(number):
                self._score(number, self.evaluate)
            self._remove_unless_kept(number)

    def _score(self, number: int, evaluate: Evaluate) -> None:
        name = self.names[number]
        record = self.table.points[name]
        scores = checked_scores(evaluate(self.writer.output / name, dict(record.settings)), f"the evaluation of {name}")
        self.objective.of(scores)  # refuses at once if the score that decides is not among them
        record.scores, record.evaluation = scores, self.evaluation
        beaten, self.table.best = self.table.best, self.table.best_of(self.names, self.objective)
        self.table.write(self.writer.output)
        if self.keep == "best" and beaten != self.table.best:
            self._remove_if_transient(beaten)
        told = ", ".join(f"{score} {value:.4g}" if value is not None else f"{score} nan" for score, value in scores.items())
        if not self.writer.quiet:
            done = sum(map(self._is_scored, range(len(self.points))))
            print(f"{done}/{len(self.points)} {name}: {told}", file=sys.stderr, flush=True)

    def _remove_unless_kept(self, number: int) -> None:
        name = self.names[number]
        if self.keep == "none" or (self.keep == "best" and name != self.table.best):
            self._remove_if_transient(name)

    def _remove_if_transient(self, name: str | None) -> None:
        if name is not None and self.table.points[name].transient:
            folder = self.writer.output / name
            if folder.exists() or partial_folder(folder).exists():
                withdraw(folder)

    def _keep_best(self) -> None:
        """The best model stays; it is written again if it was removed by an earlier run that kept none."""
        self.table.best = self.table.best_of(self.names, self.objective) if self.evaluate else None
        if self.keep == "best" and self.table.best:
            number = self.names.index(self.table.best)
            if not (self.writer.output / self.table.best).exists():
                self._write([number])
        self.table.write(self.writer.output)

    # -- what came of it

    def result(self) -> SweepResult:
        """For the caller."""
        found = {name: self._point(name) for name in self.names}
        return SweepResult(self.writer.output, list(found.values()), found[self.table.best] if self.table.best else None)

    def _point(self, name: str) -> SweepPoint:
        record, folder = self.table.points[name], self.writer.output / name
        return SweepPoint(record.settings, folder if folder.exists() else None, record.scores or {}, record.warnings)
