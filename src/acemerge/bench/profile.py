"""A look inside ACE on a suite's experts: gamma and branch of every tensor, and spectra before and after refinement."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from acemerge.bench.suites import Suite
from acemerge.methods import get_method
from acemerge.pipeline import find_sources, make_plan
from acemerge.plan import Plan, PlannedTensor
from acemerge.recipe import make_recipe
from acemerge.task_vectors import load_task_vectors


@dataclass(frozen=True)
class TensorProfile:
    """One merged matrix."""

    name: str
    gamma: float
    branch: str
    ridge_share: float
    task_norms: list[float]
    norm: float
    """Of the merged change."""
    plain_spectrum: list[float]
    """Singular values of P, the closed form, the largest being 1."""
    refined_spectrum: list[float]
    """Of M, after refinement, on the same scale."""
    overlap: float
    """How much of M's leading right singular subspace (k_frac of the directions) lies in P's: 1 if it is the same."""

    @property
    def kind(self) -> str:
        """The name without the number of its layer."""
        return ".".join("*" if part.isdigit() else part for part in self.name.split("."))


def plan_suite(suite: Suite, seed: int, **fields: object) -> Plan:
    """The plan that `acemerge merge` makes for a suite's experts."""
    models = [{"model": str(folder), "name": expert} for expert, folder in suite.folders(seed).items()]
    recipe = make_recipe({"base": str(suite.experts(seed).base), "experts": models, **suite.merge, **fields}, "bench")
    return make_plan(recipe, find_sources(recipe, offline=True))


def merged_matrices(plan: Plan) -> Iterator[tuple[PlannedTensor, Tensor]]:
    """Every tensor that the method merges, with its task vectors [task, out, in]."""
    for planned in plan.tensors:
        if planned.action == "merged":
            yield planned, load_task_vectors(plan, planned, torch.device("cpu"))[0]


def profile(suite: Suite, seed: int) -> list[TensorProfile]:
    """Of every merged matrix."""
    plan = plan_suite(suite, seed, method="ace")
    return [_profile(planned.name, task_vectors, plan) for planned, task_vectors in merged_matrices(plan)]


def _profile(name: str, task_vectors: Tensor, plan: Plan) -> TensorProfile:
    ace = get_method("ace")
    settings = {"epsilon": getattr(plan.options, "epsilon")}  # noqa: B009
    plain = ace(task_vectors, ace.options({**settings, "refine": False})).delta
    merged = ace(task_vectors, ace.options(settings))
    _, plain_values, plain_right = torch.linalg.svd(plain, full_matrices=False)
    _, values, right = torch.linalg.svd(merged.delta, full_matrices=False)
    k = max(1, int(0.3 * len(values)))
    return TensorProfile(
        name,
        float(merged.facts["gamma"]),
        str(merged.facts["branch"]),
        float(merged.facts["ridge_share"]),
        [float(task_vector.norm()) for task_vector in task_vectors],
        float(merged.delta.norm()),
        (plain_values / plain_values[0]).tolist(),
        (values / plain_values[0]).tolist(),
        float((plain_right[:k] @ right[:k].T).square().sum() / k),
    )


def profile_table(profiles: list[TensorProfile]) -> list[list[str]]:
    """By kind of tensor, over its layers."""
    lines = [
        ["tensor", "layers", "gamma", "heterogeneous", "ridge share", "norm / largest task", "rank of P", "rank of M", "overlap"]
    ]
    kinds: dict[str, list[TensorProfile]] = defaultdict(list)
    for tensor in profiles:
        kinds[tensor.kind].append(tensor)
    for kind, found in kinds.items():
        gammas = [tensor.gamma for tensor in found]
        lines.append(
            [
                kind,
                str(len(found)),
                f"{min(gammas):.2f}-{max(gammas):.2f}",
                f"{sum(tensor.branch == 'heterogeneous' for tensor in found)} of {len(found)}",
                f"{statistics.fmean(tensor.ridge_share for tensor in found):.3f}",
                f"{statistics.fmean(tensor.norm / max(tensor.task_norms) for tensor in found):.2f}",
                f"{statistics.fmean(_stable_rank(tensor.plain_spectrum) for tensor in found):.1f}",
                f"{statistics.fmean(_stable_rank(tensor.refined_spectrum) for tensor in found):.1f}",
                f"{statistics.fmean(tensor.overlap for tensor in found):.2f}",
            ]
        )
    return lines


def _stable_rank(values: list[float]) -> float:
    """Sum of squares over the largest square: how many directions carry the change."""
    return sum(value**2 for value in values) / max(values) ** 2
