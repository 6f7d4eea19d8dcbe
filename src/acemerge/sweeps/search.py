"""A sweep that chooses its points itself: optuna proposes settings by the scores of those before.

The table is the memory: a point that it has a score of is not merged again. Proposals follow from the seed and the scores alone,
so the same command goes on after an interruption where it stopped, and a finished search repeated says the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acemerge.calibration.suite import Suite
from acemerge.checkpoints.source import Sources, expand_home
from acemerge.errors import InputError, PreflightError
from acemerge.execute.opening import Scene, note_kinship, set_scene
from acemerge.execute.pipeline import Executor, check_run, open_engine, tell_kinship
from acemerge.methods import get_method
from acemerge.output.input_hashes import hashing_inputs
from acemerge.output.model_card import public_names
from acemerge.output.publishing import locked
from acemerge.output.staging import check_place
from acemerge.planning.kinship import refused_strangers
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Recipe
from acemerge.recipe.run_options import RunOptions
from acemerge.reports.page import write_report
from acemerge.sweeps.points import Point
from acemerge.sweeps.references import score_references
from acemerge.sweeps.run import Sweep, SweepOptions, SweepResult
from acemerge.sweeps.search_report import search_page
from acemerge.sweeps.space import Range, Space, make_space, sorted_numbers
from acemerge.sweeps.table import SearchRecord, read_table

REPORT = "search.html"
_AT_RANDOM = 8
"""Points before the first proposal; at most a third of all. They are merged in one pass, as a grid is."""
_AGAIN, _DRAWS = 3, 50
"""How often another point than a known one is asked for before one is drawn at random, and how often one is drawn."""


@dataclass(frozen=True)
class SearchOptions:
    """How long to search."""

    trials: int
    seed: int = 0


class Proposals:
    """optuna's sampler by Gaussian processes, which makes most of few trials."""

    def __init__(self, space: Space, options: SearchOptions) -> None:
        optuna = _optuna()
        self._space, self._left = space, options.trials
        self._at_random = max(1, min(_AT_RANDOM, options.trials // 3))
        self._sampler = optuna.samplers.GPSampler(seed=options.seed, n_startup_trials=self._at_random)
        self._chance = optuna.samplers.RandomSampler(seed=options.seed)
        self._study = optuna.create_study(direction="maximize")
        self._distributions = {
            part: _distribution(optuna, values) for name, values in space.items() for part in _parts(name, values)
        }
        self._failed = optuna.trial.TrialState.FAIL
        self._asked: list[Any] = []
        self._scores: dict[str, float] = {}
        """Of every point that was proposed; not finite where a score teaches nothing, or is not there yet."""

    def next(self) -> list[Point]:
        """What to try now: at first some at once, then one by one; none when the search is over."""
        count = min(self._left, self._at_random if not self._study.trials else 1)
        self._left -= count
        self._asked = [self._ask() for _ in range(count)]
        return list(map(self._point, self._asked))

    def _ask(self) -> Any:
        """A trial of a point that was not there before: a repeated one costs nothing, but says again what came of it."""
        for sampler in (*[self._sampler] * _AGAIN, *[self._chance] * _DRAWS):
            self._study.sampler = sampler
            trial = self._study.ask(self._distributions)
            name = self._point(trial).name
            if name not in self._scores:
                self._scores[name] = -math.inf
                return trial
            self._tell(trial, self._scores[name])
        return self._study.ask(self._distributions)  # nothing new is left, or hardly anything

    def _point(self, trial: Any) -> Point:
        return Point({name: self._value(name, trial.params) for name in self._space})

    def _value(self, name: str, chosen: Mapping[str, Any]) -> Any:
        values = self._space[name]
        if not isinstance(values, Range):
            return values[chosen[name]]
        numbers = tuple(values.rounded(chosen[part]) for part in _parts(name, values))
        return numbers if values.each else numbers[0]

    def tell(self, scores: Sequence[float]) -> None:
        """How those came out; larger is better, and what is not finite teaches nothing."""
        for trial, score in zip(self._asked, scores, strict=True):
            self._scores[self._point(trial).name] = score
            self._tell(trial, score)

    def _tell(self, trial: Any, score: float) -> None:
        self._study.tell(trial, score) if score > -math.inf else self._study.tell(trial, state=self._failed)


def _parts(name: str, values: Range | list[Any]) -> list[str]:
    """What is chosen of an option: its value, or a number for each expert."""
    return [f"{name} {i}" for i in range(values.each)] if isinstance(values, Range) and values.each else [name]


def _distribution(optuna: Any, values: Range | list[Any]) -> Any:
    if not isinstance(values, Range):
        if values == sorted_numbers(values):  # neighbours are alike, as in a range
            return optuna.distributions.IntDistribution(0, len(values) - 1)
        return optuna.distributions.CategoricalDistribution(list(range(len(values))))
    if values.whole:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("--search needs optuna: pip install 'acemerge[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def run_search(
    recipe: Recipe,
    settings: Mapping[str, Sequence[Any] | str],
    output: Path,
    run: RunOptions,
    options: SweepOptions,
    search: SearchOptions,
    *,
    relative_to: Path = Path(),
    suite: Suite | None = None,
) -> SweepResult:
    """Merge and evaluate at points that are chosen one after the other, in folders of `output`."""
    if options.evaluate is None and options.rows is None:
        raise InputError("--search goes by scores: give --evaluate COMMAND, which prints them, or --rows FOLDER")
    if search.trials < 2:
        raise InputError(f"--search {search.trials}: give at least two trials")
    output = expand_home(output)
    check_run(run)
    space = make_space(get_method(recipe.method), settings, len(recipe.experts))
    proposals = Proposals(space, search)
    check_place(output)
    table = read_table(output)
    scene = set_scene(recipe, run, relative_to, suite)
    check_place(output, scene.sources.paths)
    asked = proposals.next()
    plans = _plans(scene, recipe, asked)
    first = next(iter(plans.values()))
    table.begin(output, list(plans), recipe.method, recipe.options, (first.base, *first.experts))
    space_told = {name: values if isinstance(values, str) else ",".join(map(str, values)) for name, values in settings.items()}
    table.search = SearchRecord(trials=search.trials, seed=search.seed, space=space_told)
    with open_engine(scene) as engine, hashing_inputs(first, verify=run.verify) as hashes:
        points = {point.name: point for point in asked}
        executor = Executor(scene, engine, hashes)
        scored = options.for_models(first)
        sweep = Sweep(output, list(points.values()), list(plans.values()), table, executor, scored, search.trials)
        problems = [*sweep.find_problems(sweep.find_unfinished()), *refused_strangers(first)]
        if problems and not run.force:
            raise PreflightError(problems)
        tell_kinship(first)
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(output):
            sweep = _try_all(sweep, asked, proposals, recipe)
            sweep.keep_best()
            score_references(sweep.references(), recipe)
            if run.report:
                page = search_page(table, options.objective, _arguments(recipe, scene.sources), hashes.all())
                write_report(page, output / REPORT)
    return sweep.result()


def _arguments(recipe: Recipe, sources: Sources) -> list[str]:
    """By what names others know the models; rules for tensors can be given by a recipe only."""
    return ["recipe.yaml"] if recipe.tensors else public_names([sources.base, *sources.experts])


def _try_all(sweep: Sweep, asked: list[Point], proposals: Proposals, recipe: Recipe) -> Sweep:
    """Merge and score what is proposed until nothing is; the sweep of all these points."""
    table, objective = sweep.table, sweep.options.objective
    assert table.search is not None
    points = {point.name: point for point in sweep.points}
    plans = dict(zip(points, sweep.plans, strict=True))
    while asked:
        sweep.run(sweep.find_unfinished())
        table.search.tried += [point.name for point in asked]
        proposals.tell([objective.of(table.points[point.name].scores or {}) for point in asked])
        asked = proposals.next()
        points |= {point.name: point for point in asked}
        plans = {**_plans(sweep.executor.scene, recipe, asked, like=sweep.plans[0]), **plans}
        sweep = replace(sweep, points=list(points.values()), plans=[plans[name] for name in points])
    return sweep


def _plans(scene: Scene, recipe: Recipe, points: Sequence[Point], like: Plan | None = None) -> dict[str, Plan]:
    """By the points' names. What the weights say of the experts is looked at once, and the same for all."""
    once = {point.name: point for point in points}
    if not once:
        return {}
    made = scene.plans([point.recipe(recipe) for point in once.values()])
    noted = [replace(plan, strangers=like.strangers, doubts=like.doubts) for plan in made] if like else note_kinship(made)
    return dict(zip(once, noted, strict=True))
