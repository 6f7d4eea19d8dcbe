"""The data flow: recipe -> sources -> plan -> shards -> published folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from threadpoolctl import threadpool_limits

from acemerge.adapters.adapter import is_adapter, open_adapter
from acemerge.calibration.needed import check_data_asked, check_experts_can_run
from acemerge.checkpoints.families import choose_family
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.checkpoints.source import Source, expand_home, resolve_source
from acemerge.errors import InputError, PreflightError, did_you_mean, first_line
from acemerge.execute.local import LocalEngine
from acemerge.execute.passes import gather_statistics
from acemerge.output.input_hashes import hashing_inputs
from acemerge.output.model_card import write_documents
from acemerge.output.staging import Staging, check_output, staged_output
from acemerge.output.task_models import write_heads
from acemerge.planning.kinship import find_strangers
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.planning.progress import Progress, show_progress
from acemerge.recipe.recipe import Recipe
from acemerge.reports.figure import check_installed

if TYPE_CHECKING:
    from acemerge.bench.suites.registry import Suite
    from acemerge.execute.ray import RayEngine

ENGINES = ("local", "ray")


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
        return [*self.plan.notes, *(w for tensor in self.tensors for w in tensor["warnings"])]


@dataclass(frozen=True)
class Sources:
    """Where the recipe's models are on this machine."""

    base: Source
    experts: tuple[Source, ...]
    names: tuple[str, ...] = field(default=())
    """Unique short names, the base's first."""


def run_merge(
    recipe: Recipe,
    output: Path,
    *,
    relative_to: Path = Path(),
    device: str = "cpu",
    threads: int | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    resume: bool = True,
    overwrite: bool = False,
    offline: bool = False,
    verify: bool = False,
    force: bool = False,
    report: bool = False,
    quiet: bool = True,
    suite: Suite | None = None,
) -> MergeResult:
    """Carry out a recipe and publish the result at `output`. `suite` stands in for the recipe's data, if that is a suite."""
    output = expand_home(output)
    if threads is not None and threads < 1:
        raise InputError(f"threads={threads}: give at least one")
    check_engine(engine, device, ray_address)
    if report:
        check_installed()
    check_output(output, overwrite)
    sources = find_sources(recipe, relative_to, offline)
    check_output(output, overwrite, [source.path for source in (sources.base, *sources.experts)])
    plan = make_plan(recipe, sources, relative_to, suite)
    with (
        compute_threads(threads),
        _open_engine(engine, plan, sources, relative_to, suite, device, threads, ray_address) as chosen,
    ):
        if not force and (problems := chosen.problems(output)):
            raise PreflightError(problems)
        with (
            hashing_inputs(plan, verify=verify) as hashes,
            staged_output(output, plan.digest, resume=resume, overwrite=overwrite, inputs=hashes) as staging,
        ):
            strangers = find_strangers(plan)
            with show_progress(plan, quiet=quiet) as progress:
                for stranger in strangers:
                    progress.say(f"warning: {stranger}")
                _write_shards(plan, chosen, staging, progress)
            tensors = _records(plan, staging)
            plan = replace(plan, notes=(*plan.notes, *strangers))
            write_heads(plan, staging.folder)
            staging.check_inputs(hashes.all())
            write_documents(plan, sources, staging, hashes.all(), report)
            for model in (plan.base, *plan.experts):
                model.check_unchanged()
    return MergeResult(output, plan, tensors)


def find_sources(recipe: Recipe, relative_to: Path = Path(), offline: bool = False) -> Sources:
    """Resolve every model of the recipe, downloading what is a hub id."""
    base = resolve_source(recipe.base, relative_to=relative_to, offline=offline)
    experts = tuple(resolve_source(e.model, relative_to=relative_to, offline=offline) for e in recipe.experts)
    given = [expert.name for expert in recipe.experts]
    return Sources(base, experts, _unique_names([base, *experts], [None, *given]))


def make_plan(recipe: Recipe, sources: Sources, relative_to: Path = Path(), suite: Suite | None = None) -> Plan:
    """Open the checkpoints (headers only) and the data, if any, and decide everything."""
    return make_plans([recipe], sources, relative_to, suite)[0]


def make_plans(recipes: Sequence[Recipe], sources: Sources, relative_to: Path = Path(), suite: Suite | None = None) -> list[Plan]:
    """The same for recipes that differ in their options alone: what they read is opened once."""
    recipe = recipes[0]
    check_data_asked(recipe)
    base = open_checkpoint(sources.base.path, sources.names[0])
    problems: list[str] = []
    experts = []
    for source, name in zip(sources.experts, sources.names[1:], strict=True):
        try:
            experts.append(_open_expert(source.path, name, base, recipe.preset))
        except PreflightError as error:
            problems.extend(error.problems)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise PreflightError(problems)
    data = None
    if recipe.data is not None:
        from acemerge.calibration.source import open_data

        check_experts_can_run(recipe, experts)
        data = open_data(suite or recipe.data, base, experts, relative_to)
    return [build_plan(each, base, experts, base.config, data) for each in recipes]


def _open_expert(path: Path, name: str, base: Checkpoint, preset: str) -> Checkpoint:
    if is_adapter(path):
        return open_adapter(path, name, base, choose_family(preset, base.config, base.tensors))
    return open_checkpoint(path, name)


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


def check_engine(engine: str, device: str, ray_address: str | None) -> None:
    """Refuse an engine that does not exist, is not installed or does not go with the rest, before any work."""
    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: there is no such engine; {did_you_mean(engine, ENGINES)}")
    if engine == "local":
        if ray_address:
            raise InputError(f"--ray-address {ray_address}: only the cluster engine uses it; pass --engine ray too")
        return
    if not find_spec("ray"):
        raise InputError("--engine ray needs ray: pip install 'acemerge[cluster]'")
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: with --engine ray, give cpu, or cuda: each task then gets a GPU of its own")


@contextmanager
def _open_engine(
    engine: str,
    plan: Plan,
    sources: Sources,
    relative_to: Path,
    suite: Suite | None,
    device: str,
    threads: int | None,
    ray_address: str | None,
) -> Iterator[LocalEngine | RayEngine]:
    """What carries out the plan's shards."""
    if engine == "local":
        yield LocalEngine(plan, tuple(map(torch_device, device.split(","))))
        return
    from acemerge.execute.ray import RayEngine, ray_cluster
    from acemerge.execute.ray_task import Order

    order = Order(plan.recipe, sources, relative_to, suite, plan.digest, Path.cwd(), gathered={})
    with ray_cluster(ray_address):
        yield RayEngine(plan, order, device, threads or 1)


def _write_shards(plan: Plan, engine: LocalEngine | RayEngine, staging: Staging, progress: Progress) -> None:
    """Have every shard written that is not already finished."""
    if staging.note:
        progress.say(staging.note)
    unfinished = [shard for shard in plan.shards if not staging.reusable(shard)]
    for shard in plan.shards.keys() - unfinished:
        for tensor in plan.shards[shard]:
            progress.advance(tensor)
    if unfinished:
        hashes = staging.inputs.all if staging.inputs else dict
        engine.run(unfinished, gather_statistics(plan, engine.device, progress, hashes), staging, progress)


def torch_device(name: str) -> torch.device:
    """The device of that name, if it can be used here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        usable = "cpu" if not torch.cuda.is_available() else f"cpu, or cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        raise InputError(f"--device {name}: not available here ({first_line(error)[:80]}); use {usable}") from None
    return device


@contextmanager
def compute_threads(threads: int | None) -> Iterator[None]:
    """Limit torch's and the BLAS libraries' threads alike, so that they do not fight for cores."""
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(limits=threads):
            yield
    finally:
        torch.set_num_threads(before)


def _records(plan: Plan, staging: Staging) -> list[Mapping[str, Any]]:
    return [record.to_json() for shard in plan.shards for record in staging.finished[shard].tensors]
