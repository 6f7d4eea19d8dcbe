"""How a sweep looks on a terminal, and for programs."""

from __future__ import annotations

from typing import Any

from acemerge.cli.tables import new_console, new_table
from acemerge.sweeps.points import Point
from acemerge.sweeps.run import SweepPoint, SweepResult
from acemerge.sweeps.table import Reference


def print_sweep(result: SweepResult) -> None:
    """Every point with its scores, and the best."""
    settings = list(dict.fromkeys(name for point in result.points for name in point.settings))
    methods = ["method"] if result.points[0].method else []
    scores = list(dict.fromkeys(name for point in result.points for name in point.scores))
    warned = ["warnings"] if any(point.warnings for point in result.points) else []
    trial = ["trial"] if result.searched else []
    table = new_table(*trial, *methods, *settings, *scores, *warned, "model", right=[*trial, *settings, *scores, *warned])
    for number, point in enumerate(result.points, 1):
        words = [_setting(point, name) for name in settings]
        counts = [str(point.warnings)] if warned else []
        mark = ", the best" if point is result.best else ""
        fate = f"{'kept' if point.folder else 'removed'}{mark}"
        shown = [_score(point, name) for name in scores]
        method = [point.method or ""] if methods else []
        table.add_row(*([str(number)] if trial else []), *method, *words, *shown, *counts, fate)
    for name, reference in result.references.items():
        shown = [_score(reference, score) if score in reference.scores else "-" for score in scores]
        fate = f"for comparison: {name}{', not scored' if reference.failure else ''}"
        table.add_row(*("" for _ in (*trial, *methods, *settings)), *shown, *("" for _ in warned), fate)
    console = new_console()
    console.print(table)
    kept = [point for point in result.points if point.folder]
    if result.best:
        console.print(f"best: {Point(result.best.settings, result.best.method).name}")
    models = "1 model" if len(kept) == 1 else f"{len(kept)} models"
    points = f"{len(result.points)} point{'s' * (len(result.points) != 1)}"
    console.print(f"{points}, {models} and sweep.json in {result.output}")


def _setting(point: SweepPoint, name: str) -> str:
    return Point({name: point.settings[name]}).name.partition("=")[2] if name in point.settings else ""


def _score(point: SweepPoint | Reference, name: str) -> str:
    value = point.scores.get(name)
    return "nan" if value is None else f"{value:.4g}"


def sweep_json(result: SweepResult) -> dict[str, Any]:
    """The same for machines."""
    return {
        "output": str(result.output),
        "best": _point_json(result.best) if result.best else None,
        "points": [_point_json(point) for point in result.points],
        "references": {name: {"scores": each.scores, "failure": each.failure} for name, each in result.references.items()},
    }


def _point_json(point: SweepPoint) -> dict[str, Any]:
    return {
        **({"method": point.method} if point.method else {}),
        "settings": dict(point.settings),
        "folder": str(point.folder) if point.folder else None,
        "scores": dict(point.scores),
        "warnings": point.warnings,
    }
