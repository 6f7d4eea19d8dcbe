"""Charts that can be read: round ticks, names that fit, colours that everybody can tell apart."""

from __future__ import annotations

import pytest

from acemerge.reports.charts import HeatMap, Line, Panel, heat_map, lines
from acemerge.reports.figure import FOR_FILES


def tick_labels(low: float, high: float) -> list[str]:
    drawing = lines([Panel({"a": Line([0, 1], [low, high])}, logarithmic=True)], FOR_FILES)
    drawing.draw_without_rendering()
    axes = drawing.axes[0]
    bottom, top = axes.get_ylim()
    shown = [label.get_text() for label in axes.yaxis.get_ticklabels() if bottom <= label.get_position()[1] <= top]
    assert not axes.yaxis.get_ticklabels(minor=True)
    return shown


@pytest.mark.parametrize(("low", "high"), [(5.8, 6.6), (0.0172, 0.0223), (0.2, 30.0), (1e-6, 1.0)])
def test_ticks_of_a_logarithmic_scale_are_round(low: float, high: float) -> None:
    labels = tick_labels(low, high)
    assert 2 <= len(labels) <= 8
    assert all(len(f"{float(label):e}".split("e")[0].rstrip("0.")) <= 4 for label in labels), labels
    assert not any("times" in label for label in labels)


def test_no_line_runs_through_the_name_of_a_threshold() -> None:
    drawing = lines([Panel({"a": Line([0, 1], [0.0, 1.0])}, thresholds={"tau = 0.9": 0.9})], FOR_FILES)
    drawing.draw_without_rendering()
    [axes] = drawing.axes
    [name] = axes.texts
    label, plot = name.get_window_extent(), axes.get_window_extent()
    assert label.x0 > plot.x1
    assert label.x1 <= drawing.bbox.x1, "it fits beside the plot"


def test_long_names_are_cut_in_the_middle() -> None:
    names = ["somebody-bert-base-uncased-SST-2", "somebody-bert-base-uncased-MNLI"]
    chart = HeatMap([[0.0, 1.0], [1.0, 0.0]], names, names, 0.0, 1.0)
    drawing = heat_map(chart, FOR_FILES)
    shown = [label.get_text() for label in drawing.axes[0].get_yticklabels()]
    assert [name[-5:] for name in shown] == ["SST-2", "-MNLI"]
    assert all(len(name) == 22 and "…" in name for name in shown)


def test_what_lies_beyond_the_scale_is_told() -> None:
    beyond = heat_map(HeatMap([[0.5, 7.0]], ["a"], ["b", "c"], 0.0, 1.5), FOR_FILES)
    within = heat_map(HeatMap([[0.5, 1.0]], ["a"], ["b", "c"], 0.0, 1.5), FOR_FILES)
    assert [drawing.axes[1]._colorbar.extend for drawing in (beyond, within)] == ["max", "neither"]  # type: ignore[attr-defined]
