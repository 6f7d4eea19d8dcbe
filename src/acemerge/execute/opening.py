"""What a recipe names, found and opened: models by their headers, data; and the plans that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from acemerge.adapters.adapter import is_adapter, open_adapter, with_adapter
from acemerge.calibration.layer_rules import LayerRules
from acemerge.calibration.needed import check_data_asked, check_experts_can_run
from acemerge.calibration.source import open_data
from acemerge.calibration.suite import Suite
from acemerge.checkpoints.families import choose_family
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.checkpoints.source import Source, Sources, resolve_source
from acemerge.errors import InputError, PreflightError
from acemerge.planning.kinship import with_kinship
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.planning.slices import arrange
from acemerge.planning.vocabulary_choice import choose_vocabulary
from acemerge.recipe.recipe import Recipe
from acemerge.recipe.run_options import RunOptions


@dataclass(frozen=True)
class Scene:
    """What all merges of one run have in common: their models, their data, how they are carried out."""

    sources: Sources
    run: RunOptions = field(default_factory=RunOptions)
    relative_to: Path = Path()
    """What a recipe's paths start from."""
    suite: Suite | None = None
    """Stands in for the recipe's data, if that is a suite."""
    stand_ins: tuple[bool, ...] = ()
    """Which models, the base first, only stand in for stages that are not made yet."""
    stages: Mapping[Path, Any] = field(default_factory=dict)
    """Folder -> what is told of the merge that made it, of models that are stages of the recipe."""

    def plans(self, recipes: Sequence[Recipe]) -> list[Plan]:
        """Of recipes that differ in their options alone."""
        return make_plans(recipes, self.sources, self.relative_to, self.suite, self.stand_ins)


def set_scene(recipe: Recipe, run: RunOptions, relative_to: Path = Path(), suite: Suite | None = None) -> Scene:
    """Find every model of the recipe."""
    return Scene(find_sources(recipe, relative_to, run.offline), run, relative_to, suite)


def find_sources(recipe: Recipe, relative_to: Path = Path(), offline: bool = False) -> Sources:
    """Resolve every model of the recipe, downloading what is a hub id."""
    if not isinstance(recipe.base, str) or any(expert.merge for expert in recipe.experts):
        raise InputError("the recipe has merges as base or experts, which only `acemerge merge` and `acemerge plan` take")
    base = resolve_source(recipe.base, relative_to=relative_to, offline=offline)
    experts = tuple(resolve_source(e.model, relative_to=relative_to, offline=offline) for e in recipe.experts)
    given = [expert.name for expert in recipe.experts]
    return Sources(base, experts, _unique_names([base, *experts], [None, *given]))


def make_plan(recipe: Recipe, sources: Sources, relative_to: Path = Path(), suite: Suite | None = None) -> Plan:
    """Open the checkpoints (headers only) and the data, if any, and decide everything."""
    return make_plans([recipe], sources, relative_to, suite)[0]


def make_plans(
    recipes: Sequence[Recipe],
    sources: Sources,
    relative_to: Path = Path(),
    suite: Suite | None = None,
    stand_ins: Sequence[bool] = (),
) -> list[Plan]:
    """The same for recipes that differ in their options alone: what they read is opened once."""
    recipe = recipes[0]
    check_data_asked(recipe)
    base = _open_model(sources.base, sources.names[0], recipe.preset)
    problems: list[str] = []
    experts: list[Checkpoint] = []
    for source, name in zip(sources.experts, sources.names[1:], strict=True):
        try:
            experts.append(_open_expert(_without_base(source, sources.base), name, base, recipe.preset))
        except InputError as error:
            problems.extend(error.found)
    if problems:
        raise PreflightError(problems)
    if any(stand_ins):  # their tensors are what the stages' will be, their files are not
        base, *experts = [replace(m, files=()) if s else m for m, s in zip((base, *experts), stand_ins, strict=True)]
    if recipe.slices:
        base, experts = arrange(recipe.slices, base, experts)
    data = layers = None
    if recipe.data is not None:
        check_experts_can_run(recipe, experts)
        data = open_data(suite or recipe.data, base, experts, relative_to)
        layers = LayerRules(data, experts)
    chosen = choose_vocabulary(recipe, base, experts, base.config)
    return [build_plan(each, base, experts, base.config, data, layers, chosen) for each in recipes]


def note_kinship(plans: Sequence[Plan]) -> list[Plan]:
    """With what the weights say of the experts. The plans are of the same models, so these are looked at once."""
    first = with_kinship(plans[0])
    return [replace(plan, strangers=first.strangers, doubts=first.doubts) for plan in plans]


def _open_model(source: Source, name: str, preset: str) -> Checkpoint:
    """A full model, with the adapter that is to be merged into it first."""
    model = open_checkpoint(source.path, name)
    if source.adapter is None:
        return model
    return with_adapter(model, open_adapter(source.adapter.path, name, model, choose_family(preset, model.config, model.tensors)))


def _without_base(source: Source, base: Source) -> Source:
    """An adapter of the base as it is, if the expert is that: BASE+ADAPTER."""
    of_base = base.adapter is None and source.path.samefile(base.path)
    return source.adapter if source.adapter and of_base else source


def _open_expert(source: Source, name: str, base: Checkpoint, preset: str) -> Checkpoint:
    if is_adapter(source.path):
        return open_adapter(source.path, name, base, choose_family(preset, base.config, base.tensors))
    return _open_model(source, name, preset)


def _unique_names(sources: Sequence[Source], given: Sequence[str | None]) -> tuple[str, ...]:
    """The given names, else the folders' own; those that clash are told apart by their parents' names, then by number."""
    names = [name or source.short_name for source, name in zip(sources, given, strict=True)]
    clashing = {name for name, count in Counter(names).items() if count > 1}
    for index, (source, name) in enumerate(zip(sources, names, strict=True)):
        if name in clashing and given[index] is None:
            parent = (source.hub_id or "").split("/")[0] or source.path.resolve().parent.name
            names[index] = f"{parent}_{name}"
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}_{seen[name]}"
    return tuple(names)
