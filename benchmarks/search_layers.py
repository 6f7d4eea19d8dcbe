"""A suite's experts in memory: the matrices that a merge computes, and the scores of any merged change of them.

What is not a matrix, and what is not merged, is averaged, as ace_auto does; so a candidate differs from others in its
matrices alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from acemerge.bench.data.task import Task
from acemerge.bench.measure.evaluation import Part, evaluate, prepared_rows
from acemerge.bench.measure.merging import merge_experts
from acemerge.bench.measure.next_token import way_from_base_to_expert
from acemerge.bench.suites.plan import plan_suite
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.output.task_models import export_expert
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, computed
from acemerge.planning.view import View
from acemerge.tensors.task_vectors import load_dense


@dataclass(frozen=True)
class Layer:
    """One matrix of the model, as a method sees it."""

    name: str
    view: View
    W0: Float[Tensor, "out in"]
    D: Float[Tensor, "task out in"]
    """The experts' changes, in float32; all zero where an expert did not change it."""


@dataclass(frozen=True)
class Strength:
    """What is done to the experts before they are merged."""

    experts: int | None = None
    """Only so many, the first of the suite."""
    first: float = 1.0
    """The first expert's change is multiplied by this."""


class Regime:
    """A suite with one set of experts, ready to be scored again and again."""

    def __init__(self, suite: str, seed: int, part: Part, limit: int, strength: Strength) -> None:
        whole = get_suite(suite)
        self.suite = replace(whole, tasks=whole.tasks[: strength.experts])
        self.seed = seed
        plan = plan_suite(self.suite, seed)
        self.layers = [_layer(plan, planned, strength) for planned in computed(plan.tensors) if planned.action == "merged"]
        with tempfile.TemporaryDirectory() as place:
            names = [layer.name for layer in self.layers]
            self._tasks = _judged_tasks(self.suite, seed, part, limit, names, Path(place))

    def score(self, changes: Sequence[Tensor]) -> dict[str, float]:
        """Each task's score with these changes of the layers, in the layers' order."""
        merged = {
            layer.name: layer.view.to_stored(layer.W0 + change.to(layer.W0)).contiguous()
            for layer, change in zip(self.layers, changes, strict=True)
        }
        return {judged.task.name: judged.score(merged) for judged in self._tasks}


@dataclass(frozen=True)
class _JudgedTask:
    """A model with one expert's head, and how it is judged."""

    task: Task
    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """The model's own, by the names that a merge has for them."""
    judge: Callable[[nn.Module], float]

    def score(self, merged: Mapping[str, Tensor]) -> float:
        for name, value in merged.items():
            self.parameters[name].data = value
        return self.judge(self.model)


def _layer(plan: Plan, planned: ComputedTensor, strength: Strength) -> Layer:
    view = planned.fate.view
    D = load_dense(plan, planned, torch.device("cpu"))
    D[0] *= strength.first
    return Layer(planned.name, view, view.to_method(plan.base.read(planned.name)).clone(), D)


def _judged_tasks(suite: Suite, seed: int, part: Part, limit: int, names: Sequence[str], place: Path) -> list[_JudgedTask]:
    merge_experts(suite.experts(seed).base, suite.folders(seed), place / "merged", {**suite.merge, "method": "ace_auto"})
    merged = open_checkpoint(place / "merged", "merged")
    found = []
    for task in suite.tasks:
        folder = export_expert(place / "merged", task.expert, place / task.name) if suite.own_heads else place / "merged"
        model = suite.domain.load(folder).eval()
        parameters = {name: _parameter(model, merged.read(name)) for name in names}
        found.append(_JudgedTask(task, model, parameters, partial(_share, suite, task, part, limit, seed)))
    return found


def _share(suite: Suite, task: Task, part: Part, limit: int, seed: int, model: nn.Module) -> float:
    """Of right answers, or of the way from the base's loss to the expert's."""
    if suite.between_experts:
        return way_from_base_to_expert(suite, model, task, part, limit, seed).share
    return evaluate(suite.domain, model, prepared_rows(suite, task, part, limit), task.metric, suite.compute).share


def _parameter(model: nn.Module, value: Tensor) -> nn.Parameter:
    """The one with this value: transformers may call it otherwise than the file does."""
    (found,) = (own for own in model.parameters() if own.shape == value.shape and own.detach().equal(value))
    return found
