"""The Python interface: a checkpoint on disk, a state dict in memory, or one tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.calibration.needed import methods_using_data
from acemerge.calibration.suite import Suite
from acemerge.checkpoints.folder import from_state_dict
from acemerge.diagnosis import DEFAULT_CANDIDATES
from acemerge.diagnosis.measure import Diagnosis, measure
from acemerge.errors import InputError
from acemerge.execute.compute import torch_device
from acemerge.execute.extraction import run_extraction
from acemerge.execute.opening import find_sources, set_scene
from acemerge.execute.passes import gather_statistics
from acemerge.execute.pipeline import MergeResult, run_merge
from acemerge.methods import Context, get_method
from acemerge.methods.registry import needs_data
from acemerge.output.hub import Repository
from acemerge.output.manifest import read_merge
from acemerge.output.verify import Verification, verify_output
from acemerge.planning.kinship import with_kinship
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.planning.progress import SilentProgress
from acemerge.recipe.keywords import sort_keywords
from acemerge.recipe.recipe import DEFAULT_METHOD, Fused, Orientation, Recipe, make_recipe
from acemerge.recipe.run_options import RunOptions
from acemerge.reports.merge_report import merge_page
from acemerge.reports.page import write_report
from acemerge.sweeps.evaluation import Evaluate
from acemerge.sweeps.points import Grid, split_settings
from acemerge.sweeps.run import SweepOptions, SweepResult, run_sweep
from acemerge.sweeps.search import SearchOptions, run_search
from acemerge.sweeps.table import Objective
from acemerge.sweeps.tuning import tune as choose_by_rows
from acemerge.tensors.merging import merge_tensor

Model = str | PathLike[str]
Experts = Sequence[Model] | Mapping[str, Model]


def merge(
    base: Model,
    experts: Experts,
    output: Model,
    method: str = DEFAULT_METHOD,
    *,
    data: Model | Suite | None = None,
    tune: Model | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> MergeResult:
    """Merge checkpoints on disk (or hub ids) into the folder `output`: the same as `acemerge merge`.

    `experts` may be a mapping of names to models, each a full model or a PEFT adapter. `data` is for methods that use it: a
    folder with a file per expert, or a suite of the bench or its name. `tune` is a folder with a few rows of each expert's task,
    by which method and options are chosen.

    Keywords are a recipe's fields (tensors, slices, preset, orientation, fused, missing, tokenizer, files_from, token_sources,
    chat_template, pad_to_multiple_of, dtype, allow_nonfinite, save_as, rank, energy, save_rest, shard_size), how it is run
    (device, threads, engine, ray_address, resume, verify, overwrite, force, report, offline, quiet), each as the command line
    has it, and the method's options, such as reach=0.03. `options` takes these as a mapping, also those that are named like
    another keyword, such as cart's rank.
    """
    recipe, run, suite = _sort("acemerge.merge", base, experts, method, data, options, keywords)
    if tune is not None:
        recipe = choose_by_rows(recipe, Path(tune), Path(output), run).recipe
    return run_merge(recipe, Path(output), run, suite=suite)


def extract(
    base: Model,
    fine_tune: Model,
    output: Model,
    *,
    rank: int | None = None,
    energy: float | None = None,
    save_rest: bool = False,
    **keywords: Any,
) -> MergeResult:
    """Write what a full fine-tune changed as a LoRA adapter that peft loads on the base: the same as `acemerge extract`.

    `rank` is that of every matrix, `energy` the share of each one's change to keep, at the smallest rank that does; with both,
    the rank is the most. `save_rest` also writes what factors cannot hold, whole. Other keywords are those of `merge`.
    """
    keywords = {**keywords, "save_as": "adapter", "rank": rank, "energy": energy, "save_rest": save_rest}
    recipe, run, _ = _sort("acemerge.extract", base, [fine_tune], "average", None, None, keywords)
    return run_extraction(recipe, Path(output), run)


def sweep(
    base: Model,
    experts: Experts,
    output: Model,
    settings: Mapping[str, Sequence[Any] | str],
    method: str | Sequence[str] = DEFAULT_METHOD,
    *,
    evaluate: Evaluate | None = None,
    rows: Model | None = None,
    keep: str = "best",
    maximise: str | None = None,
    minimise: str | None = None,
    at_once: int | None = None,
    search: int | None = None,
    seed: int = 0,
    data: Model | Suite | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> SweepResult:
    """Merge at every combination of settings, such as {"reach": [0.03, 0.06]}, in one pass: the same as `acemerge sweep`.

    `evaluate(folder, settings)` gives a model's scores by name; `rows`, a folder with a few rows of each expert's task, stands in
    for it. Models are then written a few at a time, and `keep` says which stay: "best", "all" or "none". The largest first score
    is best, unless `maximise` or `minimise` names another.

    `method` may be a list; then "ace.epsilon" is for one of them, "alpha" for all that have it.

    With `search`, so many points are chosen by the scores before, also from ranges such as {"reach": "0.01..1:log"}. All
    other keywords are those of `merge`; options of the method are those that do not vary.
    """
    if maximise and minimise:
        raise InputError("maximise and minimise: one score decides; give one of them")
    methods = [method] if isinstance(method, str) else list(method)
    if not methods:
        raise InputError("method=[]: give at least one method")
    split = split_settings(methods, settings)
    sorted_ = [_sort("acemerge.sweep", base, experts, name, data, options, keywords) for name in methods]
    recipe, run, suite = sorted_[0]
    objective = Objective(minimise or maximise, largest=minimise is None)
    by_rows = None if rows is None else Path(rows)
    chosen = SweepOptions(evaluate=evaluate, rows=by_rows, keep=keep, objective=objective, at_once=at_once)
    if search is not None and len(methods) > 1:
        raise InputError("search: chooses settings of one method; give one, or leave out search")
    if search is not None:
        return run_search(recipe, settings, Path(output), run, chosen, SearchOptions(search, seed), suite=suite)
    grids = [Grid(each, own) for (each, _, _), own in zip(sorted_, split, strict=True)]
    return run_sweep(grids, Path(output), run, chosen, suite=suite)


def plan(
    base: Model,
    experts: Experts,
    method: str = DEFAULT_METHOD,
    *,
    data: Model | Suite | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Plan:
    """What `merge` with the same arguments would do to every tensor, from headers alone: the same as `acemerge plan`."""
    recipe, run, suite = _sort("acemerge.plan", base, experts, method, data, options, keywords)
    [made] = set_scene(recipe, run, suite=suite).plans([recipe])
    return made


def verify(output: Model) -> Verification:
    """Whether an output is still what was written, file by file and tensor by tensor: the same as `acemerge verify`."""
    return verify_output(Path(output))


def report(merged: Model, output: Model | None = None) -> Path:
    """Write what a merge did to every tensor as one page, by default beside the folder: the same as `acemerge report`."""
    folder = Path(merged)
    page = merge_page(read_merge(folder))
    return write_report(page, Path(output) if output else folder.resolve().with_name(f"{folder.resolve().name}.html"))


def push(output: Model, repository: str, *, public: bool = False) -> str:
    """Upload an output to the Hugging Face hub, into a repository that is private unless said otherwise; its address."""
    return Repository.checked(repository, public=public).upload(Path(output), quiet=True)


def _sort(
    origin: str,
    base: Model,
    experts: Experts,
    method: str,
    data: Model | Suite | None,
    options: Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> tuple[Recipe, RunOptions, Suite | None]:
    """The recipe, how it is run, and the suite, if the data is one."""
    suite = None if data is None or isinstance(data, str | PathLike) else data
    given = suite.name if suite else data if data is None else str(data)
    named = {"base": str(base), "experts": _named(experts), "method": method, "data": given, "options": options}
    return *sort_keywords(origin, {**keywords, **named}), suite


def diagnose(
    base: Model,
    experts: Experts,
    *,
    candidates: Sequence[str] = DEFAULT_CANDIDATES,
    quick: bool = False,
    preset: str = "auto",
    orientation: Orientation = "canonical",
    missing: str = "error",
    device: str = "cpu",
    offline: bool = False,
) -> Diagnosis:
    """Measure experts before merging them: the same as `acemerge diagnose`. `write_report` of the result makes a page of it.

    `candidates` are merges to measure, averaging besides, such as "ace" or "ace:epsilon=1e-3".
    """
    fields = {"base": str(base), "experts": _named(experts), "preset": preset, "orientation": orientation, "missing": missing}
    recipe = make_recipe(fields, "acemerge.diagnose")
    sources = find_sources(recipe, offline=offline)
    return measure(recipe, sources, SilentProgress(), candidates=candidates, device=torch_device(device), quick=quick)


def merge_state_dicts(
    base: Mapping[str, Tensor],
    experts: Sequence[Mapping[str, Tensor]] | Mapping[str, Mapping[str, Tensor]],
    method: str = DEFAULT_METHOD,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Sequence[Mapping[str, Any]] = (),
    preset: str = "auto",
    orientation: Orientation = "canonical",
    fused: Fused = "auto",
    missing: str = "error",
    allow_nonfinite: bool = False,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Tensor]:
    """Merge state dicts in memory and return one with the base's names and dtypes; the inputs are left untouched.

    The same plan as for checkpoints on disk. `config` is the base's config as a mapping, for presets that depend on it.
    Task heads stay at the base's value. Methods that use data need models that can be run: see `merge`. An expert that does not
    look like a fine-tune of the base, or is the base itself, gets a Python warning.
    """
    pairs = list(experts.items()) if isinstance(experts, Mapping) else [(f"expert {i}", e) for i, e in enumerate(experts)]
    recipe = make_recipe(
        {
            "base": "base",
            "experts": [{"model": name} for name, _ in pairs],
            "method": method,
            "options": options,
            "tensors": [dict(rule) for rule in tensors],
            "preset": preset,
            "orientation": orientation,
            "fused": fused,
            "missing": missing,
            "allow_nonfinite": allow_nonfinite,
        },
        "acemerge.merge_state_dicts",
    )
    if using := methods_using_data(recipe):
        raise InputError(f"{needs_data(using[0])}, and runs the models on it; use acemerge.merge(..., data=...)")
    opened = [from_state_dict(expert, name) for name, expert in pairs]
    plan = build_plan(recipe, from_state_dict(base, "base"), opened, config or {})
    for said in with_kinship(plan).kinship:
        warnings.warn(said, stacklevel=2)
    where = torch.device(device)
    gathered = gather_statistics(plan, where, SilentProgress())
    merged = {}
    for planned in plan.tensors:
        value = merge_tensor(plan, planned, where, gathered.get(planned.setting)).value
        # A tensor that was kept comes back as the base's own memory: hand out a copy.
        merged[planned.name] = value.clone() if value.data_ptr() == base[planned.name].data_ptr() else value
    merged |= {copy: merged[original] for copy, original in plan.omitted.items()}
    return {name: merged[name] for name in base}


def merge_task_vectors(
    task_vectors: Float[Tensor, "task *shape"],
    method: str = DEFAULT_METHOD,
    *,
    base: Tensor | None = None,
    **options: Any,
) -> Float[Tensor, "*shape"]:
    """Merge one tensor's task vectors [task, out, in] into one [out, in], in the dtype given. Pure.

    `base` is the tensor W0 that the experts changed, for methods that look at it too: the default is the average without it.

    >>> import torch
    >>> merge_task_vectors(torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]]), method="average")
    tensor([[2., 4.]])
    """
    chosen = get_method(method)
    if not isinstance(task_vectors, Tensor):
        kind = type(task_vectors).__name__
        raise InputError(f"give task vectors as one tensor [task, ...], such as torch.stack(them), not a {kind}")
    if chosen.uses == "data":
        raise InputError(f"{needs_data(method)}, and task vectors alone do not have it; use acemerge.merge(..., data=...)")
    if not task_vectors.is_floating_point() or task_vectors.dim() == 0 or len(task_vectors) == 0:
        raise InputError(f"give floating-point task vectors [task, ...] of at least one task, not {_describe(task_vectors)}")
    if not torch.isfinite(task_vectors).all():
        raise InputError(f"the task vectors hold {int((~torch.isfinite(task_vectors)).sum())} NaN or infinite values")
    if chosen.touches == "matrices" and task_vectors.dim() != 3:
        raise InputError(f"method '{method}' merges matrices: give [task, out, in], not shape {list(task_vectors.shape)}")
    wide = task_vectors.detach() if task_vectors.dtype in (torch.float32, torch.float64) else task_vectors.detach().float()
    if base is not None and base.shape != task_vectors.shape[1:]:
        raise InputError(f"base has shape {list(base.shape)}, the task vectors {list(task_vectors.shape[1:])}: give W0 itself")
    context = Context(experts=tuple(map(str, range(len(wide)))), base=base)
    merged = chosen(wide, chosen.options(options).resolve({}), context)
    return merged.delta.to(task_vectors.dtype)


def _named(experts: Experts) -> list[dict[str, str | None]]:
    """The experts as a recipe has them."""
    if isinstance(experts, str | PathLike):
        raise InputError(f"experts={str(experts)!r}: give a list of models, or a mapping of names to models")
    pairs = list(experts.items()) if isinstance(experts, Mapping) else [(None, expert) for expert in experts]
    return [{"model": str(model), "name": name} for name, model in pairs]


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
