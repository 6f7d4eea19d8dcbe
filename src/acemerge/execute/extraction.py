"""A full fine-tune as an adapter: a merge of one expert, which has nothing to merge, written as factors."""

from __future__ import annotations

from pathlib import Path

from acemerge.errors import InputError
from acemerge.execute.pipeline import MergeResult, run_merge
from acemerge.recipe.recipe import Recipe
from acemerge.recipe.run_options import RunOptions


def run_extraction(recipe: Recipe, output: Path, run: RunOptions) -> MergeResult:
    """Carry out a recipe of one expert, and publish the adapter at `output`."""
    if recipe.rank is None and recipe.energy is None:
        raise InputError("extract: say how large the adapter may be: --rank 32, or --energy 0.95 to keep so much of every change")
    return run_merge(recipe, output, run)
