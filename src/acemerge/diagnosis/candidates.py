"""The merges that a diagnosis compares: a method and its options, written as `ace` or `ace:epsilon=1e-3,alpha=0.5`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acemerge.checkpoints.source import Sources
from acemerge.errors import InputError, MergeError
from acemerge.execute.opening import make_plan
from acemerge.execute.passes import Gathered, gather_statistics
from acemerge.methods import Merged, get_method
from acemerge.numerics.frame import Frame
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, computed, is_computed
from acemerge.recipe.arguments import parse_settings
from acemerge.recipe.recipe import Recipe
from acemerge.tensors.task_vectors import tensor_context


@dataclass(frozen=True)
class Candidate:
    """One merge, planned: what it would do to each tensor, by the tensor's name."""

    label: str
    plan: Plan
    tensors: dict[str, PlannedTensor]
    statistics: Gathered

    def merge(self, name: str, task_vectors: Tensor, frame: Frame | None) -> Merged:
        """The merged change of one tensor, in the coordinates of the task vectors."""
        own = self.tensors[name]
        if not is_computed(own):
            return Merged(torch.zeros_like(task_vectors[0]))
        context = tensor_context(self.plan, own, frame, self.statistics.get(own.setting))
        try:
            return get_method(own.fate.method)(task_vectors, own.fate.options, context)
        except ArithmeticError as error:
            raise MergeError(f"-m {self.label}: tensor '{name}': {error}") from None


def common_core(planned: ComputedTensor, candidates: Sequence[Candidate]) -> ComputedTensor:
    """The tensor in the adapters' core if every candidate merges it there; as a whole matrix otherwise."""
    own = computed([candidate.tensors[planned.name] for candidate in candidates])
    shared = all(tensor.fate.core == planned.fate.core for tensor in own)
    return planned if shared else replace(planned, fate=replace(planned.fate, core=None))


def plan_candidates(
    texts: Sequence[str], recipe: Recipe, sources: Sources, device: torch.device, progress: Progress
) -> list[Candidate]:
    """Plan each of them; every mistake is told before anything is read."""
    wanted = [(text, *parse_candidate(text)) for text in dict.fromkeys(texts)]
    planned = []
    for text, method, options in wanted:
        if get_method(method).uses == "data":
            raise InputError(f"-m {text}: uses data, and a diagnosis looks at weights alone; merge with it and evaluate instead")
        if get_method(method).per_task:
            raise InputError(f"-m {text}: makes one model per task, so there is no one merge to compare; see `acemerge methods`")
        planned.append((text, make_plan(recipe.model_copy(update={"method": method, "options": options}), sources)))
    return [
        Candidate(text, plan, {tensor.name: tensor for tensor in plan.tensors}, gather_statistics(plan, device, progress))
        for text, plan in planned
    ]


def of_recipe(recipe: Recipe) -> list[str]:
    """The merge that a recipe asks for, if it can be compared."""
    method = get_method(recipe.method)
    if method.per_task or method.uses == "data":
        return []
    options = ",".join(f"{name}={value}" for name, value in recipe.options.items())
    return [f"{method.name}:{options}" if options else method.name]


def parse_candidate(text: str) -> tuple[str, dict[str, Any]]:
    """The method and the options given.

    >>> parse_candidate("ace:epsilon=1e-3,refine=false")
    ('ace', {'epsilon': 0.001, 'refine': False})
    """
    name, _, rest = text.partition(":")
    settings: list[str] = []
    for part in filter(None, rest.split(",")):
        if "=" in part or not settings:
            settings.append(part)
        else:  # a value that is a list, as in weights=0.7,0.3
            settings[-1] += f",{part}"
    options = parse_settings(settings, f"-m {name}:")
    method = get_method(name.strip())
    method.options(options)
    return method.name, options
