"""`merge --tune`: a method and its options, chosen from a few by the rows of each expert's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acemerge.checkpoints.source import expand_home
from acemerge.errors import InputError
from acemerge.execute.stages import stages_of
from acemerge.output.staging import check_output
from acemerge.recipe.recipe import DEFAULT_METHOD, Recipe
from acemerge.recipe.run_options import RunOptions
from acemerge.sweeps.points import Grid
from acemerge.sweeps.run import SweepOptions, SweepPoint, SweepResult, run_sweep

CANDIDATES: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "ace_auto": {"reach": ["auto", 0.015, 0.03, 0.06, 0.12, 0.2, 0.4], "power": [0.25, 0.5]},
    "average": {},
    "ace": {},
    "tsv_m": {},
    "iso_cts": {},
    "task_arithmetic": {},
}
"""What is tried; of equal ones the first is chosen. docs/tuning.md says what it was measured to bring."""


@dataclass(frozen=True)
class Tuned:
    """A recipe with what was chosen, and how the others came out."""

    recipe: Recipe
    tried: SweepResult


def tune(recipe: Recipe, rows: Path, output: Path, run: RunOptions, *, relative_to: Path = Path()) -> Tuned:
    """Merge by every candidate, score each by the rows, and keep the best one's settings. Scores stay beside the output."""
    output = expand_home(output)
    check_output(output, run.overwrite)
    if recipe.method != DEFAULT_METHOD or recipe.options:
        raise InputError(
            "--tune: chooses the method and its options, so leave out -m and -s; to choose among values of your own: "
            f"acemerge sweep ... -m METHOD -s KEY=VALUE,VALUE --rows {rows}"
        )
    if recipe.save_as == "adapter" or recipe.slices or next(stages_of(recipe), None):
        raise InputError("--tune: runs whole models, merged in one step; leave out --as adapter, slices and stages")
    grids = [Grid(recipe.model_copy(update={"method": name}), values) for name, values in CANDIDATES.items()]
    place = output.with_name(f"{output.name}-tuning")
    options = SweepOptions(rows=rows, keep="none")
    tried = run_sweep(grids, place, replace(run, report=False, overwrite=True), options, relative_to=relative_to)
    assert tried.best
    best = tried.best
    chosen = {"method": best.method, "options": dict(best.settings), "notes": [*recipe.notes, _note(tried, best, rows)]}
    return Tuned(recipe.model_copy(update=chosen), tried)


def _note(tried: SweepResult, best: SweepPoint, rows: Path) -> str:
    """For the manifest: how much was tried, on what, and what came of it."""
    average = next(point for point in tried.points if point.method == "average")
    return (
        f"method and options were chosen from {len(tried.points)} by the rows of {rows.resolve().name}: they score "
        f"{best.scores['mean']:.4f}, averaging {average.scores['mean']:.4f}"
    )
