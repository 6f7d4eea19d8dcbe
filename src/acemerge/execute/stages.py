"""Recipes of several stages: models that are merges themselves are made first, depth first, each as a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from acemerge.calibration.suite import Suite
from acemerge.errors import InputError
from acemerge.execute.opening import Scene, note_kinship, set_scene
from acemerge.output.existing import holds_merge
from acemerge.output.input_hashes import hashing_inputs
from acemerge.output.manifest import read_merge
from acemerge.output.staging import withdraw
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Expert, Recipe, Stage
from acemerge.recipe.run_options import RunOptions


def stages_of(recipe: Recipe) -> Iterator[Stage]:
    """Every stage below a recipe, those that others need first."""
    for stage in (recipe.base, *(expert.stage for expert in recipe.experts)):
        if isinstance(stage, Stage):
            yield from stages_of(stage.merge)
            yield stage


def with_models(recipe: Recipe, model_of: Callable[[Stage], str]) -> Recipe:
    """The recipe with a plain model in place of each of its stages."""
    base = model_of(recipe.base) if isinstance(recipe.base, Stage) else recipe.base
    experts = [Expert(model=model_of(own), name=own.name) if (own := each.stage) else each for each in recipe.experts]
    return recipe.model_copy(update={"base": base, "experts": experts})


def stand_in(recipe: Recipe) -> Recipe:
    """A recipe to plan before the stages exist: a stage's output has the tensors of its base."""
    return with_models(recipe, lambda stage: str(stand_in(stage.merge).base))


def plan_before_stages(recipe: Recipe, run: RunOptions, relative_to: Path, suite: Suite | None = None) -> tuple[Scene, Plan]:
    """A merge as far as it can be planned before its stages exist."""
    _check_once(recipe)
    planned = stand_in(recipe)
    stand_ins = (isinstance(recipe.base, Stage), *(expert.merge is not None for expert in recipe.experts))
    scene = replace(set_scene(planned, run, relative_to, suite), stand_ins=stand_ins)
    return scene, scene.plans([planned])[0]


def _check_once(recipe: Recipe) -> None:
    """Side by side, a model is given once; that two stages are one, their files would tell only when they are made."""
    stages = [stage for stage in (recipe.base, *(expert.stage for expert in recipe.experts)) if isinstance(stage, Stage)]
    for one, other in combinations(stages, 2):
        if one.merge == other.merge:
            raise InputError(f"stages '{one.name}' and '{other.name}' of one merge are the same; give each model once")


def plan_stages(recipe: Recipe, run: RunOptions, relative_to: Path) -> dict[str, Plan]:
    """Plan every stage; raises an error for whatever cannot be done, before any work."""
    contents: dict[str, Recipe] = {}
    plans: dict[str, Plan] = {}
    for stage in stages_of(recipe):
        if contents.setdefault(stage.name, stage.merge) != stage.merge:
            raise InputError(f"stage '{stage.name}': two different stages have this name; give each its own")
        if stage.name in plans:
            continue
        _, plan = plan_before_stages(stage.merge, run, relative_to)
        if plan.per_task_methods:
            raise InputError(f"stage '{stage.name}': {plan.per_task_methods[0]} makes a model per task, not one to merge further")
        plans[stage.name] = plan
    return plans


@dataclass
class StageMaker:
    """Makes stages in the folder `place`, each content once."""

    place: Path
    run: RunOptions
    relative_to: Path
    merge: Callable[[Recipe, Path, Mapping[Path, Any]], object]
    made: list[tuple[Recipe, Path]] = field(default_factory=list)
    records: dict[Path, Any] = field(default_factory=dict)
    """Folder of a stage -> what the outer manifest and recipe say of it."""

    def make(self, recipe: Recipe) -> Recipe:
        """The recipe with the stages' folders in their place."""
        return with_models(recipe, lambda stage: str(self._folder(stage)))

    def _folder(self, stage: Stage) -> Path:
        for recipe, folder in self.made:
            if recipe == stage.merge:
                return folder
        plain, folder = self.make(stage.merge), (self.place / stage.name).absolute()
        if not (self.run.resume and folder.exists() and self._is_made(plain, folder)):
            self.merge(plain, folder, self.records)
        self.made.append((stage.merge, folder))
        self.records[folder] = _record(folder)
        return folder

    def _is_made(self, recipe: Recipe, folder: Path) -> bool:
        plans = note_kinship(set_scene(recipe, self.run, self.relative_to).plans([recipe]))
        with hashing_inputs(plans[0], verify=self.run.verify) as hashes:
            return holds_merge(folder, plans[0], hashes.all())

    def remove(self) -> None:
        """What was made, and the place, unless somebody put something else there."""
        for _, folder in self.made:
            withdraw(folder)
        if not any(self.place.iterdir()):
            self.place.rmdir()


def _record(folder: Path) -> dict[str, Any]:
    """A stage as its own folder tells of it, with the stages below it."""
    told = read_merge(folder)
    recipe = yaml.safe_load((folder / "acemerge.yaml").read_text(encoding="utf-8"))
    facts = {name: getattr(told, name) for name in ("base", "experts", "method", "options", "inputs", "outputs", "stages")}
    return {"recipe": recipe, **facts}
