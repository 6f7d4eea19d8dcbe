"""A sweep from its settings to its table: plans, one pass that writes every point's model, evaluation, what is kept.

Every point's folder is staged and published as a merge's is: absent or whole. sweep.json says what is done, so that the same
command goes on after an interruption, and a larger grid adds to a smaller one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from acemerge.calibration.needed import methods_using_data
from acemerge.calibration.suite import Suite
from acemerge.checkpoints.source import expand_home
from acemerge.errors import InputError, PreflightError, did_you_mean, printable
from acemerge.execute.opening import note_kinship, set_scene
from acemerge.execute.pipeline import Executor, check_run, open_engine, tell_kinship
from acemerge.methods import get_method
from acemerge.output.existing import holds_merge
from acemerge.output.input_hashes import hashing_inputs
from acemerge.output.publishing import locked
from acemerge.output.staging import check_output, check_place, partial_folder, withdraw
from acemerge.planning.kinship import refused_strangers
from acemerge.planning.plan import Plan
from acemerge.recipe.run_options import RunOptions
from acemerge.sweeps.evaluation import Evaluate, checked_scores, describe_evaluation
from acemerge.sweeps.points import Grid, Point, check_distinct, make_points
from acemerge.sweeps.references import References, score_references
from acemerge.sweeps.room import check_room, check_room_for_some, fitting_at_once, groups
from acemerge.sweeps.row_scores import RowScores
from acemerge.sweeps.table import FIRST_SCORE, Objective, Record, Reference, Table, read_table

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
    method: str | None = None
    """Where the sweep has several."""


@dataclass(frozen=True)
class SweepResult:
    """What a sweep wrote and found, for the caller."""

    output: Path
    points: Sequence[SweepPoint]
    best: SweepPoint | None
    """By the objective, if the points were evaluated."""
    searched: bool = False
    """Whether the points were chosen one after the other; then they are in that order."""
    references: Mapping[str, Reference] = field(default_factory=dict)
    """What the base, the experts and plain averaging score, if the points were evaluated."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What is done with the points: how they are scored, and which models stay."""

    evaluate: Evaluate | None = None
    rows: Path | None = None
    """Instead: a folder with a few rows of each expert's task, by which points are scored."""
    keep: str = "best"
    objective: Objective = FIRST_SCORE
    at_once: int | None = None
    """Models on the disk at a time, where not all stay; by default what fits in half of its free space."""

    def __post_init__(self) -> None:
        if self.evaluate and self.rows:
            raise InputError("--evaluate and --rows: both score the points; give one of them")
        if self.at_once is not None and self.at_once < 1:
            raise InputError(f"at_once={self.at_once}: give at least one")
        if self.keep not in KEEP:
            own = "which models stay; a method's own keep is set like any option, --set keep=..., in Python options={'keep': ...}"
            raise InputError(f"keep={self.keep}: {did_you_mean(str(self.keep), KEEP)}; it says {own}")

    def for_models(self, plan: Plan) -> SweepOptions:
        """With what scores by the rows, now that the experts are known."""
        if self.rows is None:
            return self
        return replace(self, evaluate=RowScores.open(expand_home(self.rows), plan.base, plan.experts), rows=None)


def run_sweep(
    grids: Sequence[Grid],
    output: Path,
    run: RunOptions,
    options: SweepOptions,
    *,
    relative_to: Path = Path(),
    suite: Suite | None = None,
) -> SweepResult:
    """Merge at every point of these grids, one for each method, into folders of `output`, and evaluate each, if asked to."""
    output = expand_home(output)
    check_run(run)
    several = len(grids) > 1
    grids = _with_data_where_used(grids)
    own = [make_points(get_method(grid.recipe.method), grid.settings, named=several) for grid in grids]
    points = [point for points in own for point in points]
    check_place(output)
    table = read_table(output)
    scene = set_scene(grids[0].recipe, run, relative_to, suite)
    check_place(output, scene.sources.paths)
    made = [scene.plans([point.recipe(grid.recipe) for point in points]) for grid, points in zip(grids, own, strict=True)]
    plans = note_kinship([plan for plans in made for plan in plans])
    check_distinct(points, plans)
    method = "several" if several else grids[0].recipe.method
    options_of = {grid.recipe.method: grid.recipe.options for grid in grids if grid.recipe.options}
    common = options_of if several else grids[0].recipe.options
    table.begin(output, [point.name for point in points], method, common, (plans[0].base, *plans[0].experts))
    with open_engine(scene) as engine, hashing_inputs(plans[0], verify=run.verify) as hashes:
        sweep = Sweep(output, points, plans, table, Executor(scene, engine, hashes), options.for_models(plans[0]))
        unfinished = sweep.find_unfinished()
        problems = [*sweep.find_problems(unfinished), *refused_strangers(plans[0])]
        if problems and not run.force:
            raise PreflightError(problems)
        tell_kinship(plans[0])
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(output):
            sweep.run(unfinished)
            sweep.keep_best()
            score_references(sweep.references(), grids[0].recipe)
    return sweep.result()


def _with_data_where_used(grids: Sequence[Grid]) -> list[Grid]:
    """Of several methods only some may use the data; if none does, they are left to refuse it."""
    using = [bool(methods_using_data(grid.recipe)) for grid in grids]
    if not any(using):
        return list(grids)
    without = [replace(grid, recipe=grid.recipe.model_copy(update={"data": None})) for grid in grids]
    return [grid if uses else other for grid, other, uses in zip(grids, without, using, strict=True)]


@dataclass
class Sweep:
    """The work of a sweep, point by point; `table` is what is done."""

    output: Path
    points: Sequence[Point]
    plans: Sequence[Plan]
    table: Table
    executor: Executor
    options: SweepOptions
    total: int | None = None
    """How many points there will be, if not all are known yet."""

    def __post_init__(self) -> None:
        self.names = [point.name for point in self.points]
        self.evaluate, self.objective = self.options.evaluate, self.options.objective
        self.evaluation = describe_evaluation(self.evaluate) if self.evaluate else None
        self.keep = self.options.keep if self.evaluate else "all"  # without scores there is no best

    # -- what there is to do

    def find_unfinished(self) -> list[int]:
        """The points without a model that is needed; refuses folders that hold something else."""
        unfinished = []
        for number, (name, plan) in enumerate(zip(self.names, self.plans, strict=True)):
            folder = self.output / name
            there = folder.exists() and holds_merge(folder, plan, self.executor.hashes.all())
            if folder.exists() and not there:
                check_output(folder, self.executor.scene.run.overwrite)
            if not there and (self.keep == "all" or not self._is_scored(number)):
                unfinished.append(number)
        return unfinished

    def _record(self, number: int) -> Record | None:
        record = self.table.points.get(self.names[number])
        return record if record and record.digest == self.plans[number].digest else None

    def _is_scored(self, number: int) -> bool:
        record = self._record(number)
        return record is not None and record.scores is not None and record.evaluation == self.evaluation

    def find_problems(self, unfinished: Sequence[int]) -> list[str]:
        """What is too small for it."""
        plans = [self.plans[number] for number in unfinished]
        if self.keep == "all":
            problems = check_room(self.output, [self.names[number] for number in unfinished], plans)
        else:
            problems = check_room_for_some(self.output, plans, self.options.at_once)
        by_method = [[self.plans[number] for number in numbers] for numbers in self._by_method(unfinished)]
        return list(dict.fromkeys([*problems, *(each for own in by_method for each in self.executor.engine.problems(own))]))

    def _by_method(self, numbers: Sequence[int]) -> list[list[int]]:
        """What can be merged in one pass: points of one method, which stand side by side."""
        return [list(own) for _, own in groupby(numbers, key=lambda number: self.plans[number].method.name)]

    # -- doing it

    def run(self, unfinished: Sequence[int]) -> None:
        """Write and evaluate group by group."""
        output = self.output
        output.mkdir(exist_ok=True)
        try:
            self._note_points(unfinished)
            finished = [number for number in range(len(self.points)) if number not in unfinished]
            for number in finished:
                with locked(output / self.names[number]):  # a kill may have left the lock of a point that is done
                    pass
            self._evaluate(finished)
            size = self.options.at_once or (len(self.points) if self.keep == "all" else fitting_at_once(output, self.plans))
            for own in self._by_method(unfinished):
                for group in groups(len(own), size):
                    chosen = [own[index] for index in group]
                    self._write(chosen)
                    self._evaluate(chosen)
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
        self.table.write(self.output)

    def _write(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        names = [self.names[number] for number in numbers]
        results = self.executor.merge([self.plans[number] for number in numbers], [self.output / name for name in names])
        for name, result in zip(names, results, strict=True):
            self.table.points[name].warnings = sum(len(tensor["warnings"]) for tensor in result.tensors)
        self.table.write(self.output)

    def _evaluate(self, numbers: Sequence[int]) -> None:
        """Score these points, as far as they are not, and remove the models that only had to be scored."""
        for number in numbers:
            if self.evaluate and not self._is_scored(number):
                self._score(number, self.evaluate)
            self._remove_unless_kept(number)

    def _score(self, number: int, evaluate: Evaluate) -> None:
        name = self.names[number]
        record = self.table.points[name]
        scores = checked_scores(evaluate(self.output / name, dict(record.settings)), f"the evaluation of {name}")
        self.objective.of(scores)  # refuses at once if the score that decides is not among them
        record.scores, record.evaluation = scores, self.evaluation
        beaten, self.table.best = self.table.best, self.table.best_of(self.names, self.objective)
        self.table.write(self.output)
        if self.keep == "best" and beaten != self.table.best:
            self._remove_if_transient(beaten)
        told = ", ".join(f"{score} {value:.4g}" if value is not None else f"{score} nan" for score, value in scores.items())
        if not self.executor.scene.run.quiet:
            done = sum(map(self._is_scored, range(len(self.points))))
            print(printable(f"{done}/{self.total or len(self.points)} {name}: {told}"), file=sys.stderr, flush=True)

    def _remove_unless_kept(self, number: int) -> None:
        name = self.names[number]
        if self.keep == "none" or (self.keep == "best" and name != self.table.best):
            self._remove_if_transient(name)

    def _remove_if_transient(self, name: str | None) -> None:
        if name is not None and self.table.points[name].transient:
            folder = self.output / name
            if folder.exists() or partial_folder(folder).exists():
                withdraw(folder)

    def keep_best(self) -> None:
        """The best model stays; it is written again if it was removed by an earlier run that kept none."""
        self.table.best = self.table.best_of(self.names, self.objective) if self.evaluate else None
        if self.keep == "best" and self.table.best:
            number = self.names.index(self.table.best)
            if not (self.output / self.table.best).exists():
                self._write([number])
        self.table.write(self.output)

    # -- what came of it

    def references(self) -> References | None:
        """What to compare with, where there are scores."""
        if self.evaluate is None:
            return None
        return References(self.output, self.plans, self.table, self.executor, self.evaluate)

    def result(self) -> SweepResult:
        """For the caller."""
        found = {name: self._point(name) for name in self.names}
        best = found[self.table.best] if self.table.best else None
        references = self.table.references if self.evaluate else {}
        return SweepResult(self.output, list(found.values()), best, searched=self.total is not None, references=references)

    def _point(self, name: str) -> SweepPoint:
        record, folder = self.table.points[name], self.output / name
        method = self.points[self.names.index(name)].method
        return SweepPoint(record.settings, folder if folder.exists() else None, record.scores or {}, record.warnings, method)
