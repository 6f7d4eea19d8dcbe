"""A suite's base and experts as a recipe and a plan, for looking at their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from acemerge.bench.suites.registry import Suite
from acemerge.execute.opening import find_sources, make_plan
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor, computed
from acemerge.recipe.recipe import Recipe, make_recipe
from acemerge.tensors.task_vectors import load_task_vectors


def suite_recipe(suite: Suite, seed: int) -> Recipe:
    """The recipe by which the bench merges a suite's experts by ACE."""
    models = [{"model": str(folder), "name": expert} for expert, folder in suite.folders(seed).items()]
    return make_recipe({"base": str(suite.experts(seed).base), "experts": models, **suite.merge}, "bench")


def plan_suite(suite: Suite, seed: int) -> Plan:
    """The plan that `acemerge merge` makes of it."""
    recipe = suite_recipe(suite, seed)
    return make_plan(recipe, find_sources(recipe, offline=True))


def merged_matrices(plan: Plan) -> Iterator[tuple[PlannedTensor, Tensor]]:
    """Every tensor that the method merges, with its task vectors [task, out, in]."""
    for planned in computed(plan.tensors):
        if planned.action == "merged":
            yield planned, load_task_vectors(plan, planned, torch.device("cpu"))[0]
