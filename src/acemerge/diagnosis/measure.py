"""The diagnosis: every tensor of every expert measured once, one tensor at a time, from the weights alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acemerge.adapters.change import LoraChange
from acemerge.checkpoints.families import align_names
from acemerge.checkpoints.source import Sources
from acemerge.diagnosis import DEFAULT_CANDIDATES
from acemerge.diagnosis.candidates import Candidate, common_core, parse_candidate, plan_candidates
from acemerge.diagnosis.entries import Entries, read_entries
from acemerge.diagnosis.interference import Objective
from acemerge.diagnosis.spectra import Spectra, measure_spectra
from acemerge.errors import MergeError
from acemerge.execute.opening import make_plan
from acemerge.layer_names import depths, kind_of
from acemerge.methods import Method, get_method
from acemerge.methods.ace import AceOptions, covariance_weights, heterogeneity, regulariser_share
from acemerge.numerics.covariance import Experts
from acemerge.numerics.frame import Frame, standard_frame
from acemerge.numerics.linalg import directions_flops
from acemerge.output.input_hashes import Hashes, hashing_inputs
from acemerge.output.model_card import public_names
from acemerge.output.overreach import share_of_directions, times_allowed
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, computed, core_shape, is_computed
from acemerge.recipe.recipe import Recipe, TensorRule
from acemerge.tensors.nonfinite import nonfinite_values
from acemerge.tensors.task_vectors import load_task_vectors, tensor_context
from acemerge.version import __version__, versions


@dataclass(frozen=True)
class MergeForecast:
    """What one candidate would do to one tensor."""

    interference: list[float | None]
    """For each expert of the tensor: 0 as the expert, 1 as the base, above 1 where other experts outweigh its own change."""
    objective: float | None
    """The same of all experts together, which strong ones dominate."""
    norm_ratio: float
    """|M| over the largest |D_t|."""
    times_allowed: float | None
    """|M| over the length above which `merge` warns, if the middle of the matrices is there."""


@dataclass(frozen=True)
class TensorDiagnosis:
    """One tensor that at least one expert may have changed."""

    name: str
    shape: tuple[int, ...]
    kind: str
    depth: int | None
    fate: str
    """What `acemerge merge` would do with it: merged, averaged or kept."""
    reason: str
    experts: tuple[int, ...]
    """Which experts have it: what lists below are in the order of."""
    entries: Entries
    gamma: float | None
    """Heterogeneity of the experts' energies; None where no expert changed it."""
    heterogeneous: bool = False
    ridge_share: float | None = None
    """The regulariser's part of the trace of ACE's system; of merged matrices."""
    mean_share: list[float] = field(default_factory=list)
    """Of merged matrices: the part of each expert's energy in its column means, which ACE's centring removes."""
    forecasts: Mapping[str, MergeForecast] = field(default_factory=dict)
    spectra: Spectra | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was measured."""

    base: str
    experts: tuple[str, ...]
    adapters: tuple[str, ...]
    """Those of the experts that are adapters: of this base by their making."""
    ranks: Mapping[str, tuple[int, int]]
    """Of each adapter, the lowest and the highest rank of its changes."""
    preset: str
    model_type: str
    ace: Mapping[str, Any]
    """The options of ACE that gamma's threshold, ridge share and spectra refer to."""
    candidates: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorDiagnosis, ...]
    quick: bool
    arguments: tuple[str, ...]
    """What commands about these models begin with: models by the names that others know them by, no local paths, and flags."""
    inputs: Hashes
    """Model -> file -> its hash."""
    versions: Mapping[str, str]

    @cached_property
    def matrices(self) -> list[TensorDiagnosis]:
        """What ACE would merge."""
        return [tensor for tensor in self.tensors if tensor.fate == "merged"]

    def command(self, verb: str, *more: str, only: Collection[int] | None = None) -> str:
        """A command line about the same models, or some of the experts; empty where just a recipe's text can leave some out."""
        if only is None:
            return shlex.join(["acemerge", verb, *self.arguments, *more])
        models, flags = self.arguments[: len(self.experts) + 1], self.arguments[len(self.experts) + 1 :]
        if not only or len(models) <= len(self.experts):
            return ""
        return shlex.join(["acemerge", verb, models[0], *(models[t + 1] for t in sorted(only)), *flags, *more])

    @property
    def compares_ace(self) -> bool:
        """Whether a merge by ACE is among the candidates."""
        return any(parse_candidate(label)[0] == "ace" for label in self.candidates)

    def __str__(self) -> str:
        from acemerge.diagnosis.findings import findings, verdict

        found = findings(self)
        told = [f"- {finding.text} {finding.advice}".rstrip() for finding in found]
        return "\n".join([verdict(found)[1], *told])

    def write_report(self, path: str | Path) -> Path:
        """As one self-contained HTML file."""
        from acemerge.diagnosis.report import diagnosis_page
        from acemerge.reports.figure import check_installed
        from acemerge.reports.page import write_report

        check_installed()
        return write_report(diagnosis_page(self), Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what they amount to."""
        from acemerge.diagnosis.findings import findings, verdict
        from acemerge.diagnosis.summary import Summary

        found = findings(self)
        level, sentence = verdict(found)
        whole = {"level": level, "verdict": sentence, "findings": [asdict(finding) for finding in found]}
        return {"acemerge": __version__, **whole, "forecasts": Summary(self).forecasts, **asdict(self)}


def measure(
    recipe: Recipe,
    sources: Sources,
    progress: Progress,
    *,
    candidates: Sequence[str] = DEFAULT_CANDIDATES,
    device: torch.device | None = None,
    quick: bool = False,
) -> Diagnosis:
    """Measure the experts of a recipe. Averaging is always among what is compared.

    With `quick`, distances and spectra come from the first, middle and last layer only.
    """
    where = device or torch.device("cpu")
    recipe = _by_ace(recipe)
    plan = make_plan(recipe, sources)
    everything = _plan_of_everything(plan, sources)
    comparable = recipe.model_copy(update={"tensors": [*_rules_to_keep(plan), *recipe.tensors]})
    planned_candidates = plan_candidates([*candidates, "average"], comparable, sources, where, progress)
    looked_into = _looked_into(plan, quick)
    place = depths(tensor.name for tensor in everything.tensors)
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    found = []
    with hashing_inputs(plan, verify=False) as hashes:
        for wide in everything.tensors:
            if is_computed(wide):
                planned = by_name[wide.name]
                tensor = _Measure(plan, planned, wide, place[wide.name], where)
                found.append(tensor.take(planned_candidates if wide.name in looked_into else None))
            progress.advance(wide)
        inputs = hashes.all()
    return Diagnosis(
        plan.base.name, tuple(e.name for e in plan.experts), tuple(e.name for e in plan.experts if e.changes is not None),
        _ranks(plan),
        plan.family.name, str(plan.base.config.get("model_type", "unknown")),
        asdict(plan.options), tuple(c.label for c in planned_candidates), plan.notes, tuple(found), quick,
        _arguments(recipe, sources), inputs, versions(),
    )  # fmt: skip


def _arguments(recipe: Recipe, sources: Sources) -> tuple[str, ...]:
    """Rules for tensors can be given by a recipe only."""
    if recipe.tensors:
        return ("recipe.yaml",)
    asked = {"--preset": recipe.preset, "--orientation": recipe.orientation, "--missing": recipe.missing}
    usual = {"--preset": "auto", "--orientation": "canonical", "--missing": "error"}
    flags = [word for flag, value in asked.items() if value != usual[flag] for word in (flag, value)]
    return (*public_names([sources.base, *sources.experts]), *flags)


def _ranks(plan: Plan) -> dict[str, tuple[int, int]]:
    found = {e.name: [c.rank for c in (e.changes or {}).values() if isinstance(c, LoraChange)] for e in plan.experts}
    return {name: (min(ranks), max(ranks)) for name, ranks in found.items() if ranks}


def planned_work(recipe: Recipe, sources: Sources, candidates: Sequence[str], *, quick: bool) -> tuple[Plan, dict[str, float]]:
    """For its progress bar: what a diagnosis will read, and the operations of looking into matrices, by their names."""
    plan = make_plan(_by_ace(recipe), sources)
    methods = [get_method(parse_candidate(text)[0]) for text in dict.fromkeys(candidates)]
    looked_into = _looked_into(plan, quick)
    more = {t.name: _flops_of_a_look(t, methods) for t in computed(plan.tensors) if t.name in looked_into}
    return _plan_of_everything(plan, sources), more


def _flops_of_a_look(tensor: ComputedTensor, methods: Sequence[Method]) -> float:
    """Each candidate's merge and its forecast, and the spectra of ACE's P and M and of every expert."""
    tasks, rows, columns = core_shape(tensor)
    forecast = 2.0 * tasks * rows * columns * min(rows, columns)
    spectra = 2 * get_method("ace").flops(tasks, rows, columns)
    spectra += (2 + tasks) * directions_flops(rows, columns, min(rows, columns))
    return spectra + sum(method.flops(tasks, rows, columns) + forecast for method in methods)


def _by_ace(recipe: Recipe) -> Recipe:
    """The same models, to be merged by ACE from weights alone."""
    return recipe if recipe.method == "ace" else recipe.model_copy(update={"method": "ace", "options": {}, "data": None})


def _plan_of_everything(plan: Plan, sources: Sources) -> Plan:
    """A plan in which every weight that experts share with the base takes part, also those that the preset keeps."""
    wide: dict[str, Any] = {"method": "average", "options": {}, "tensors": _rules_to_keep(plan), "save_as": "model"}
    wide |= {"rank": None, "energy": None, "save_rest": False}
    return make_plan(plan.recipe.model_copy(update=wide), sources)


def _rules_to_keep(plan: Plan) -> list[TensorRule]:
    """Leave to the base what ACE leaves to it and what an expert has in another shape, as with a larger vocabulary."""
    kept = {tensor.name: tensor.header.shape for tensor in plan.tensors if tensor.action == "kept"}
    misfits = {
        ours
        for expert in plan.experts
        for theirs, ours in align_names(plan.base.tensors, expert.tensors).items()
        if ours in kept and expert.tensors[theirs].shape != kept[ours]
    }
    return [TensorRule(match=name, do="keep") for name in kept if name in misfits]


def _looked_into(plan: Plan, quick: bool) -> set[str]:
    return _sample(plan) if quick else {tensor.name for tensor in plan.tensors if _is_one_matrix(tensor)}


def _is_one_matrix(tensor: PlannedTensor) -> bool:
    """Whether ACE would merge it, and it can be looked into as one; of a stack of experts only the entries are measured."""
    return is_computed(tensor) and tensor.action == "merged" and not tensor.fate.view.stacked


def _sample(plan: Plan) -> set[str]:
    """The matrices of the first, the middle and the last layer, and those outside of layers."""
    merged = [tensor.name for tensor in plan.tensors if _is_one_matrix(tensor)]
    place = depths(merged)
    layers = sorted({depth for depth in place.values() if depth is not None})
    chosen = {None, *(layers[i] for i in (0, len(layers) // 2, -1) if layers)}
    return {name for name in merged if place[name] in chosen}


class _Measure:
    """One tensor at a time."""

    def __init__(self, plan: Plan, planned: PlannedTensor, wide: ComputedTensor, depth: int | None, device: torch.device) -> None:
        self.plan, self.planned, self.wide, self.depth, self.device = plan, planned, wide, depth, device

    def take(self, candidates: Sequence[Candidate] | None) -> TensorDiagnosis:
        """Everything about it; forecasts and spectra where there are candidates."""
        planned, is_matrix = self.planned, _is_one_matrix(self.planned)
        chosen = common_core(planned, candidates or ()) if is_matrix and is_computed(planned) else self.wide
        task_vectors, frame = load_task_vectors(self.plan, chosen, self.device)
        base = tensor_context(self.plan, chosen, frame).base
        assert base is not None
        entries = read_entries(task_vectors, frame, base)
        if not all(map(math.isfinite, entries.energies)):
            problem = nonfinite_values(self.plan, chosen) or "a weight change is not finite"
            raise MergeError(f"tensor '{planned.name}': {problem}")
        changed = [energy for energy in entries.energies if energy > 0]
        gamma = heterogeneity(changed) if changed else None
        options = self.plan.options
        assert isinstance(options, AceOptions)
        heterogeneous = gamma is not None and gamma > options.tau
        ridge_share: float | None = None
        mean_share: list[float] = []
        if is_matrix and changed:
            ridge_share, mean_share = _regularisation(task_vectors, frame, entries.energies, options, heterogeneous)
        looked_into = candidates if is_matrix and changed else None
        return TensorDiagnosis(
            planned.name, planned.header.shape, kind_of(planned.name, len(planned.header.shape)), self.depth, planned.action,
            planned.reason, tuple(source.expert for source in chosen.experts), entries, gamma, heterogeneous, ridge_share,
            mean_share, dict(self._forecasts(chosen, task_vectors, frame, looked_into, entries)) if looked_into else {},
            self._spectra(chosen, task_vectors, frame, heterogeneous) if looked_into else None,
        )  # fmt: skip

    def _forecasts(
        self, chosen: ComputedTensor, task_vectors: Tensor, frame: Frame | None, candidates: Sequence[Candidate], entries: Entries
    ) -> Iterator[tuple[str, MergeForecast]]:
        objective = Objective(task_vectors, frame)
        active = [energy for energy in entries.energies if energy > 0]
        expert, share = math.sqrt(math.fsum(active) / len(active)), share_of_directions(chosen)
        for candidate in candidates:
            M = candidate.merge(chosen.name, task_vectors, frame).delta
            length = float(M.double().norm())
            times = times_allowed(length, expert, lambda: math.sqrt(entries.base_energy), share)
            yield candidate.label, MergeForecast(*objective.of(M), length / math.sqrt(max(active)), times)

    def _spectra(self, chosen: ComputedTensor, task_vectors: Tensor, frame: Frame | None, heterogeneous: bool) -> Spectra:
        """Of P and M of ACE."""
        ace, options = get_method("ace"), asdict(self.plan.options)
        context = tensor_context(self.plan, chosen, frame)
        P = ace(task_vectors, ace.options({**options, "refine": False}), context).delta
        M = ace(task_vectors, ace.options(options), context).delta if heterogeneous and options["refine"] else P
        return measure_spectra(task_vectors, P, M, (frame or standard_frame(task_vectors)).shape)


def _regularisation(
    task_vectors: Tensor, frame: Frame | None, energies: Sequence[float], options: AceOptions, heterogeneous: bool
) -> tuple[float, list[float]]:
    """The ridge's part of the trace of ACE's system, and what centring takes from each expert."""
    frame = frame or standard_frame(task_vectors)
    changed = [t for t, energy in enumerate(energies) if energy > 0]
    traces = Experts(task_vectors, changed, frame, centre=True).traces([energies[t] for t in changed])
    a, e = covariance_weights(traces, options, heterogeneous)
    kept = dict(zip(changed, traces, strict=True))
    shares = [max(0.0, 1 - kept[t] / energy) if energy > 0 else 0.0 for t, energy in enumerate(energies)]
    return regulariser_share(a, e, traces, frame.shape[1]), shares
