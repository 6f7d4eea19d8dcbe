"""The few kinds of chart that reports are made of, each narrow enough for a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acemerge.reports.figure import DASHES, SERIES, Palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Drawing

WIDTH = 4.1
"""Inches: letters stay readable when a phone shows it a little smaller."""
_MOST_LABELLED_CELLS = 10
_ROUND = (1, 2, 5, 10)
"""Steps between ticks."""
_LONGEST_IN_THREE = 16
_LONGEST_LABEL = 22
"""Letters: a longer name leaves no room for the chart, and stands in full in the table of tensors."""


@dataclass(frozen=True)
class Line:
    """Points, and how they are joined."""

    x: Sequence[float]
    y: Sequence[float]
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines in it."""

    lines: Mapping[str, Line]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    thresholds: Mapping[str, float] | None = None
    """Horizontal lines with their meaning."""
    reference: Line | None = None
    """What the lines are compared with: dashed, on top of them."""
    logarithmic: bool = False
    whole_x: bool = False


def _style(palette: Palette) -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context(
        {
            "font.family": "sans-serif", "font.size": 8.5, "text.color": palette.ink, "axes.labelcolor": palette.ink,
            "axes.edgecolor": palette.muted, "axes.titlesize": 8.5, "axes.titlecolor": palette.ink, "xtick.color": palette.muted,
            "ytick.color": palette.muted, "xtick.labelcolor": palette.ink, "ytick.labelcolor": palette.ink,
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": palette.grid,
            "grid.linewidth": 0.6, "axes.facecolor": "none", "figure.facecolor": "none", "legend.frameon": False,
            "legend.labelcolor": palette.ink, "axes.axisbelow": True, "axes.unicode_minus": False, "text.parse_math": False,
        }
    )  # fmt: skip


def lines(panels: Sequence[Panel], palette: Palette, height: float = 2.3) -> Drawing:
    """Panels side by side, two in a row, with one legend below them all."""
    from matplotlib.figure import Figure as Drawing

    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    legend_rows = math.ceil(len(labels) / _legend_columns(labels))
    panel_height = height if columns == 1 else 1.6
    with _style(palette):
        drawing = Drawing(figsize=(WIDTH, rows * panel_height + 0.2 * legend_rows + 0.25), layout="constrained")
        grid = drawing.subplots(rows, columns, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, panel, labels, palette)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        _add_legend(drawing, labels)
    return drawing


def _draw_panel(axes: Axes, panel: Panel, labels: Sequence[str], palette: Palette) -> None:
    from matplotlib.ticker import MaxNLocator

    for label, line in panel.lines.items():
        axes.plot(line.x, line.y, **_appearance(labels.index(label)), marker=line.marker, markersize=3.5, linewidth=1.3)
    if panel.reference:
        axes.plot(panel.reference.x, panel.reference.y, color=palette.ink, linewidth=1, linestyle=(0, (2, 2)))
    for meaning, value in (panel.thresholds or {}).items():
        axes.axhline(value, color=palette.ink, linewidth=0.9, linestyle=(0, (5, 2)))
        axes.annotate(  # beside the axes, where no line can run through it
            meaning, (1, value), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            ha="left", va="center", fontsize=7.5, color=palette.ink,
        )  # fmt: skip
    if panel.logarithmic:
        axes.set_yscale("log")
        _round_ticks(axes.yaxis, *axes.get_ylim())
    axes.xaxis.set_major_locator(MaxNLocator(8 if panel.whole_x else 4, integer=panel.whole_x, steps=_ROUND))
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _round_ticks(axis: Axis, lowest: float, highest: float) -> None:
    """Ticks of a logarithmic scale at numbers that people count in, written as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    decades = math.log10(highest / lowest)
    narrow = MaxNLocator(4, steps=_ROUND)
    axis.set_major_locator(narrow if decades < 1 else LogLocator(subs=(1, 2, 5) if decades < 2 else (1,), numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _appearance(index: int) -> dict[str, Any]:
    return {"color": SERIES[index % len(SERIES)], "linestyle": DASHES[index // len(SERIES) % len(DASHES)]}


def _add_legend(drawing: Drawing, labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    if len(labels) > 1:
        handles = [Line2D([], [], **_appearance(i), label=_short(label)) for i, label in enumerate(labels)]
        drawing.legend(handles=handles, loc="outside lower center", ncols=_legend_columns(labels), fontsize=7.5)


def _legend_columns(labels: Sequence[str]) -> int:
    """As many as fit, and no row that is nearly empty."""
    fitting = 3 if max(map(len, labels)) <= _LONGEST_IN_THREE else 2
    return math.ceil(len(labels) / math.ceil(len(labels) / fitting))


def _short(label: str) -> str:
    """Names of models often differ at their ends only, so what is cut is the middle."""
    if len(label) <= _LONGEST_LABEL:
        return label
    kept = _LONGEST_LABEL - 1
    return f"{label[: kept // 2]}…{label[kept // 2 - kept :]}"


@dataclass(frozen=True)
class HeatMap:
    """Numbers in rows and columns; None is left empty."""

    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    lowest: float
    highest: float
    colours: str = "viridis"
    x_label: str = ""
    logarithmic: bool = False
    decimals: int = 2


def heat_map(chart: HeatMap, palette: Palette) -> Drawing:
    """Cells with their numbers where there is room, and a scale."""
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure as Drawing

    values = np.array([[math.nan if value is None else value for value in row] for row in chart.values], dtype=float)
    scale = LogNorm if chart.logarithmic else Normalize
    columns = [_short(column) for column in chart.columns]
    longest = max(map(len, columns))
    turned = longest > 3
    with _style(palette):
        height = 0.7 + 0.26 * len(chart.rows) + (0.055 * longest if turned else 0.1)
        drawing = Drawing(figsize=(WIDTH, max(1.5, height)), layout="constrained")
        axes = drawing.subplots()
        mesh = axes.pcolormesh(
            values, cmap=chart.colours, norm=scale(chart.lowest, chart.highest), edgecolors=palette.grid, linewidth=0.4
        )
        axes.invert_yaxis()
        axes.grid(False)
        step = math.ceil(len(columns) / 16)
        axes.set_xticks(np.arange(len(columns))[::step] + 0.5, columns[::step], rotation=60 if turned else 0,
                        ha="right" if turned else "center", rotation_mode="anchor" if turned else "default")  # fmt: skip
        axes.set_yticks(np.arange(len(chart.rows)) + 0.5, [_short(row) for row in chart.rows])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(chart.x_label)
        if len(columns) <= _MOST_LABELLED_CELLS:
            _label_cells(axes, mesh, values, chart.decimals)
        outside = bool(np.nanmax(values) > chart.highest)
        bar = drawing.colorbar(mesh, ax=axes, pad=0.02, aspect=30, extend="max" if outside else "neither")
        bar.outline.set_visible(False)
        if chart.logarithmic:
            _round_ticks(bar.ax.yaxis, chart.lowest, chart.highest)
    return drawing


def _label_cells(axes: Axes, mesh: Any, values: Any, decimals: int) -> None:
    """Dark letters on light cells, light ones on dark cells."""
    for row, column in zip(*(abs(values) >= 0).nonzero(), strict=True):  # NaN, an empty cell, is not >= 0
        value = values[row, column]
        red, green, blue, _ = mesh.cmap(mesh.norm(value))
        light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
        axes.text(
            column + 0.5, row + 0.5, f"{value:z.{decimals}f}", ha="center", va="center", fontsize=7,
            color="#111111" if light else "#f5f5f5",
        )  # fmt: skip
