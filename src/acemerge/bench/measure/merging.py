"""A merge as the bench asks for it: fields of a recipe and options of the method side by side, as in `acemerge.merge`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.execute.pipeline import MergeResult, run_merge
from acemerge.recipe.keywords import sort_keywords


def merge_experts(
    base: Path,
    experts: Mapping[str, Path],
    output: Path,
    request: Mapping[str, Any],
    *,
    threads: int | None = 1,
    device: str = "cpu",
    overwrite: bool = False,
) -> MergeResult:
    """Merge models on this machine. The request's data, if any, is a suite."""
    suite = request.get("data")
    named = [{"model": str(folder), "name": name} for name, folder in experts.items()]
    models = {"base": str(base), "experts": named, "data": suite.name if suite else None}
    how = {"threads": threads, "device": device, "overwrite": overwrite, "offline": True}
    recipe, run = sort_keywords("bench", {**request, **models, **how})
    return run_merge(recipe, output, run, suite=suite)
