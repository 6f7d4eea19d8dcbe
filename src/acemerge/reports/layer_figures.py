"""Figures over a model's layers that a diagnosis and the report of a merge share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from acemerge.layer_names import kinds_in_order
from acemerge.reports.charts import HeatMap, Line, Panel, heat_map, lines
from acemerge.reports.figure import Figure

Point = tuple[str, int | None, float | None]
"""Kind of layer, depth, value."""
_WIDE = 100
"""Values that differ more than this are drawn on a logarithmic scale."""


def by_depth(points: Iterable[Point]) -> dict[str, Line]:
    """A line for each kind of layer: the mean of its values at each depth."""
    found: dict[str, dict[int, list[float]]] = {}
    for kind, depth, value in points:
        if value is not None and depth is not None and math.isfinite(value):
            found.setdefault(kind, {}).setdefault(depth, []).append(value)
    return {kind: line_of(found[kind]) for kind in kinds_in_order(found)}


def line_of(by_place: Mapping[int, Sequence[float]]) -> Line:
    """The mean at each place."""
    places = sorted(by_place)
    return Line(places, [statistics.fmean(by_place[place]) for place in places], "o")


def heterogeneity_figure(points: Iterable[Point], tau: float) -> list[Figure]:
    """The paper's figure of gamma; nothing where it decides nothing, because no matrix is above tau."""
    drawn = list(points)
    if not any(value is not None and value > tau for _, _, value in drawn):
        return []
    caption = (
        f"Heterogeneity gamma of the experts' energies, by layer and kind of matrix. Above tau = {tau:g} ACE normalises the "
        "experts' covariances and refines the spectrum; below it keeps their own strength."
    )
    return depth_figure("heterogeneity", "How unequal the experts are", caption, drawn, "gamma", {f"tau = {tau:g}": tau})


def regulariser_figure(points: Iterable[Point], epsilon: str) -> list[Figure]:
    """How much of the system is the ridge."""
    caption = (
        f"The ridge's part of the trace of the system that ACE solves, at epsilon = {epsilon}. Near 0 the experts' covariances "
        "decide; near 1 the merge is close to averaging."
    )
    return depth_figure("regulariser", "How much of ACE's system is its regulariser", caption, points, "ridge share")


def depth_figure(
    name: str, title: str, caption: str, points: Iterable[Point], y_label: str, thresholds: Mapping[str, float] | None = None
) -> list[Figure]:
    """One line for each kind of layer; nothing if there are no points."""
    drawn = by_depth(points)
    if not drawn:
        return []
    told = "; ".join(f"{kind} {min(line.y):.3g} to {max(line.y):.3g}" for kind, line in drawn.items())
    against = "".join(f", against {meaning}" for meaning in thresholds or {})
    values = [value for line in drawn.values() for value in line.y]
    panel = Panel(
        drawn, x_label="layer", y_label=y_label, thresholds=thresholds, whole_x=True,
        logarithmic=min(values) > 0 and max(values) > _WIDE * min(values),
    )  # fmt: skip
    return [Figure(name, title, caption, f"Lines of {y_label} over layers{against}: {told}.", partial(lines, [panel]))]


def expert_by_layer_figure(
    name: str, title: str, caption: str, alternative: str, experts: Sequence[str],
    places: Sequence[int | None], values: Sequence[Sequence[float | None]],
) -> list[Figure]:  # fmt: skip
    """A cell for each expert and layer, on a logarithmic scale; nothing if all are empty."""
    positive = [value for row in values for value in row if value]
    if not positive:
        return []
    chart = HeatMap(
        values, experts, ["-" if place is None else str(place) for place in places], min(positive), max(positive), "magma_r",
        x_label="layer (-: outside of layers)" if None in places else "layer",
        logarithmic=max(positive) > 1.01 * min(positive), decimals=3,
    )  # fmt: skip
    return [Figure(name, title, caption, alternative, partial(heat_map, chart))]
