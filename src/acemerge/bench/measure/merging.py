"""A merge as the bench asks for it: fields of a recipe and options of the method side by side, as in `acemerge.merge`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.execute.pipeline import MergeResult, run_merge
from acemerge.recipe.recipe import Recipe, make_recipe


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
    fields = {name: value for name, value in request.items() if name in Recipe.model_fields}
    options = {name: value for name, value in request.items() if name not in Recipe.model_fields}
    recipe = make_recipe(
        {
            **fields,
            "base": str(base),
            "experts": [{"model": str(folder), "name": name} for name, folder in experts.items()],
            "options": {**fields.get("options", {}), **options},
            "data": suite.name if suite else None,
        },
        "bench",
    )
    return run_merge(recipe, output, threads=threads, device=device, overwrite=overwrite, offline=True, suite=suite)
