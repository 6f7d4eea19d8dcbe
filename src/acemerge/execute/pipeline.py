"""The data flow: recipe -> sources -> plans -> shards -> published folders. One merge is the case of one plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from acemerge.calibration.suite import Suite
from acemerge.checkpoints.source import expand_home
from acemerge.errors import InputError, PreflightError, printable
from acemerge.execute.compute import compute_threads
from acemerge.execute.engines.registry import Engine, Work, get_engine
from acemerge.execute.opening import Scene, note_kinship, set_scene
from acemerge.execute.own_tokenizer import write_own_tokenizer
from acemerge.execute.passes import gather_at_points
from acemerge.execute.stages import StageMaker, plan_before_stages, plan_stages, stages_of
from acemerge.output.input_hashes import InputHashes, hashing_inputs
from acemerge.output.manifest import Manifest, TensorRecord
from acemerge.output.model_card import write_documents
from acemerge.output.overreach import with_cautions
from acemerge.output.resources import check_space, needed_space
from acemerge.output.staging import Staging, check_output, check_place, staged_output
from acemerge.output.task_models import write_heads
from acemerge.planning.kinship import refused_strangers
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress, show_progress
from acemerge.recipe.recipe import Recipe
from acemerge.recipe.run_options import RunOptions
from acemerge.reports.figure import check_installed
from acemerge.reports.merge_report import merge_page

REPORT = "report.html"


@dataclass(frozen=True)
class MergeResult:
    """What a merge wrote, for the caller."""

    output: Path
    plan: Plan = field(repr=False)
    tensors: Sequence[Mapping[str, Any]] = field(repr=False)
    """One record per tensor of the output: what the manifest holds."""

    @property
    def warnings(self) -> list[str]:
        """Every warning raised on the way."""
        return [
            *self.plan.notes,
            *self.plan.kinship,
            *self.plan.cautions,
            *(w for tensor in self.tensors for w in tensor["warnings"]),
        ]

    def __str__(self) -> str:
        count = len(self.warnings)
        warned = f"; {count} warning{'s' if count > 1 else ''}" if count else ""
        return f"{self.output}: {self.plan}{warned}"


def run_merge(
    recipe: Recipe,
    output: Path,
    run: RunOptions,
    *,
    relative_to: Path = Path(),
    suite: Suite | None = None,
) -> MergeResult:
    """Carry out a recipe and publish the result at `output`. `suite` stands in for the recipe's data, if that is a suite."""
    output = expand_home(output)
    check_run(run)
    check_output(output, run.overwrite)
    if next(stages_of(recipe), None):
        return _run_staged(recipe, output, run, relative_to, suite)
    return _run_plain(recipe, output, run, relative_to, suite)


def _run_staged(recipe: Recipe, output: Path, run: RunOptions, relative_to: Path, suite: Suite | None) -> MergeResult:
    """Make the stages, then the merge of them; finished stages stay for the next run if this one fails."""
    plan_stages(recipe, run, relative_to)
    scene, _ = plan_before_stages(recipe, run, relative_to, suite)
    check_output(output, run.overwrite, scene.sources.paths)
    hidden = output.with_name(f".{output.name}.stages")
    place = expand_home(Path(run.keep_stages)) if run.keep_stages else hidden
    if output.resolve() in (place.resolve(), *place.resolve().parents):
        raise InputError(f"--keep-stages {run.keep_stages}: is or lies in the output; give a folder beside it")
    check_place(place, scene.sources.paths)
    of_stages = replace(run, report=False, overwrite=run.overwrite or not run.keep_stages)

    def merge(stage: Recipe, folder: Path, below: Mapping[Path, Any]) -> MergeResult:
        check_output(folder, of_stages.overwrite)
        return _run_plain(stage, folder, of_stages, relative_to, None, below)

    maker = StageMaker(place, of_stages, relative_to, merge)
    try:
        result = _run_plain(maker.make(recipe), output, run, relative_to, suite, maker.records)
    except BaseException:
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
        raise
    if not run.keep_stages:
        maker.remove()
    return replace(result, plan=replace(result.plan, recipe=recipe))  # as it was asked for: the stages' folders may be gone


def _run_plain(
    recipe: Recipe,
    output: Path,
    run: RunOptions,
    relative_to: Path,
    suite: Suite | None,
    stages: Mapping[Path, Any] | None = None,
) -> MergeResult:
    scene = replace(set_scene(recipe, run, relative_to, suite), stages=stages or {})
    check_output(output, run.overwrite, scene.sources.paths)
    plans = note_kinship(scene.plans([recipe]))
    with open_engine(scene) as engine:
        space = check_space(output, needed_space(plans[0], engine.at_once(plans[0])))
        problems = [*([space] if space else []), *engine.problems(plans), *refused_strangers(plans[0])]
        if problems and not run.force:
            raise PreflightError(problems)
        tell_kinship(plans[0])
        with hashing_inputs(plans[0], verify=run.verify) as hashes:
            return Executor(scene, engine, hashes).merge(plans, [output])[0]


@contextmanager
def open_engine(scene: Scene) -> Iterator[Engine]:
    """The engine that was asked for, with the threads that it may use."""
    with compute_threads(scene.run.threads), get_engine(scene.run.engine).open_engine(scene) as engine:
        yield engine


def tell_kinship(plan: Plan) -> None:
    """Before the work, and also where no progress is shown."""
    for said in plan.kinship:
        print(printable(f"warning: {said}"), file=sys.stderr, flush=True)


def check_run(run: RunOptions) -> None:
    """Refuse, before anything else, what cannot be had here."""
    get_engine(run.engine).check(run)
    if run.report:
        check_installed()


@dataclass(frozen=True)
class Executor:
    """Merges plans that differ in their options alone, in one pass over the models, and publishes each in its own folder."""

    scene: Scene
    engine: Engine
    hashes: InputHashes
    """Of the models' files, computed on the side."""

    def merge(self, plans: Sequence[Plan], outputs: Sequence[Path]) -> list[MergeResult]:
        """Carry out all of these plans; every output appears when it is whole."""
        with ExitStack() as open_outputs:
            stagings = [open_outputs.enter_context(self._staged(*each)) for each in zip(plans, outputs, strict=True)]
            with show_progress(plans[0], quiet=self.scene.run.quiet) as progress:
                for note in dict.fromkeys(staging.note for staging in stagings if staging.note):
                    progress.say(note)
                self._write_shards(plans, stagings, progress)
            plans = [with_cautions(plan, _written(plan, staging)) for plan, staging in zip(plans, stagings, strict=True)]
            for plan, staging in zip(plans, stagings, strict=True):
                self._complete(plan, staging)
            for model in (plans[0].base, *plans[0].experts):
                model.check_unchanged()
            return [
                MergeResult(output, plan, _records(plan, s)) for output, plan, s in zip(outputs, plans, stagings, strict=True)
            ]

    def _staged(self, plan: Plan, output: Path) -> AbstractContextManager[Staging]:
        run = self.scene.run
        return staged_output(output, plan.digest, resume=run.resume, overwrite=run.overwrite, inputs=self.hashes)

    def _write_shards(self, plans: Sequence[Plan], stagings: Sequence[Staging], progress: Progress) -> None:
        """Have every shard written that is not already finished."""
        left = {shard: [i for i, staging in enumerate(stagings) if not staging.reusable(shard)] for shard in plans[0].shards}
        for shard in (shard for shard, points in left.items() if not points):
            for tensor in plans[0].shards[shard]:
                progress.advance(tensor)
        shards = {shard: points for shard, points in left.items() if points}
        if not shards:
            return
        points = sorted({point for own in shards.values() for point in own})
        found = gather_at_points([plans[point] for point in points], self.engine.device, progress, self.hashes.all)
        self.engine.run(Work(plans, stagings, dict(zip(points, found, strict=True)), shards), progress)

    def _complete(self, plan: Plan, staging: Staging) -> None:
        """Everything of an output but its shards."""
        write_heads(plan, staging.folder)
        write_own_tokenizer(plan, staging.folder)
        hashes = self.hashes.all()
        staging.check_inputs(hashes)
        write_documents(
            plan, self.scene.sources, staging, hashes, self.scene.stages, _add_page if self.scene.run.report else None
        )


def _add_page(manifest: Manifest, folder: Path) -> None:
    (folder / REPORT).write_text(merge_page(manifest).to_html(), encoding="utf-8")


def _written(plan: Plan, staging: Staging) -> list[TensorRecord]:
    return [record for shard in plan.shards for record in staging.finished[shard].tensors]


def _records(plan: Plan, staging: Staging) -> list[Mapping[str, Any]]:
    return [record.to_json() for record in _written(plan, staging)]
