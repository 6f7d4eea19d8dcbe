"""The figures of a diagnosis: the paper's analyses, and what users ask beyond them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from acemerge.diagnosis.entries import BINS, REACH
from acemerge.diagnosis.measure import Diagnosis, TensorDiagnosis
from acemerge.diagnosis.spectra import Spectra, Spectrum
from acemerge.diagnosis.summary import CAVEAT, Matrix, Summary, pairs
from acemerge.layer_names import kinds_in_order, layers_of
from acemerge.reports.charts import HeatMap, Line, Panel, heat_map, lines
from acemerge.reports.figure import Figure
from acemerge.reports.layer_figures import (
    Point,
    depth_figure,
    expert_by_layer_figure,
    heterogeneity_figure,
    regulariser_figure,
)

_MOST_PANELS = 8
"""Stands at the figures themselves, which people pass on without the page."""


def figures(diagnosis: Diagnosis) -> list[Figure]:
    """Those for which there is something to show."""
    summary = Summary(diagnosis)
    asked = [make for make in _FIGURES if diagnosis.compares_ace or make not in _OF_ACE]
    return [figure for make in asked for figure in make(summary)]


def _points(tensors: Iterable[TensorDiagnosis], value: Callable[[TensorDiagnosis], float | None]) -> Iterator[Point]:
    return ((tensor.kind, tensor.depth, value(tensor)) for tensor in tensors)


def _heterogeneity(summary: Summary) -> Iterable[Figure]:
    return heterogeneity_figure(_points(summary.diagnosis.matrices, lambda tensor: tensor.gamma), summary.diagnosis.ace["tau"])


def _forecasts(summary: Summary) -> Iterator[Figure]:
    diagnosis, compared = summary.diagnosis, list(summary.forecasts)
    if not compared:
        return
    values = [[summary.interference(candidate, t) for t in summary.tasks] for candidate in compared]
    chart = HeatMap(values, compared, diagnosis.experts, 0.0, 1.5, "cividis_r")
    listing = "; ".join(f"{candidate} {mean:.2f}" for candidate, mean in summary.forecasts.items())
    yield Figure(
        "forecast",
        "Distance of each merge from each expert, under ACE's own objective",
        f"{CAVEAT} It is taken under the covariances that the weights reveal, over what leaving the base costs, the mean over "
        "matrices. 0: on this expert's inputs the merged layer does what the expert does. 1: what the base does. All experts "
        f"together, strong ones counting for more: {listing}.",
        f"A table of methods by experts. All experts together: {listing}.",
        partial(heat_map, chart),
    )
    layers = {c: _by_layer(diagnosis, partial(summary.objective, c)) for c in compared}
    if any(len(line.x) > 1 for line in layers.values()):
        panel = Panel(layers, x_label="layer", y_label="distance", thresholds={"as the base": 1.0}, whole_x=True)
        yield Figure(
            "forecast-by-layer",
            "The same distance by layer",
            f"All experts together. {CAVEAT}",
            "Lines of distance over layers: "
            + "; ".join(f"{c} {min(line.y):.2f} to {max(line.y):.2f}" for c, line in layers.items() if line.y) + ".",
            partial(lines, [panel]),
        )  # fmt: skip


def _by_layer(diagnosis: Diagnosis, value: Callable[[Sequence[TensorDiagnosis]], float | None]) -> Line:
    layers: dict[int, list[TensorDiagnosis]] = {}
    for tensor in diagnosis.matrices:
        if tensor.depth is not None:
            layers.setdefault(tensor.depth, []).append(tensor)
    measured = {depth: value(tensors) for depth, tensors in sorted(layers.items())}
    return Line([d for d, v in measured.items() if v is not None], [v for v in measured.values() if v is not None], "o")


def _changes(summary: Summary) -> Iterable[Figure]:
    """Energies per expert and layer, relative to the base."""
    diagnosis = summary.diagnosis
    places = layers_of(tensor.depth for tensor in diagnosis.tensors)
    listing = "; ".join(f"{n} {c:.2%}" for n, c in zip(diagnosis.experts, summary.relative_changes, strict=True))
    return expert_by_layer_figure(
        "changes",
        "Which layers each expert changed",
        "|W_t - W0| / |W0| over all tensors of a layer, those included that a merge keeps at the base. Empty: not changed.",
        f"A table of experts by layers. Over all merged matrices: {listing}.",
        diagnosis.experts,
        places,
        [[_relative_change(diagnosis, expert, place) for place in places] for expert in summary.tasks],
    )


def _relative_change(diagnosis: Diagnosis, expert: int, place: int | None) -> float | None:
    own = [tensor for tensor in diagnosis.tensors if tensor.depth == place and expert in tensor.experts]
    base = math.fsum(tensor.entries.base_energy for tensor in own)
    energy = math.fsum(tensor.entries.energies[tensor.experts.index(expert)] for tensor in own)
    return math.sqrt(energy / base) if base and energy else None


def _similarities(summary: Summary) -> Iterator[Figure]:
    if len(summary.diagnosis.experts) < 2:
        return
    yield from _similarity(
        summary, summary.cosines, "cosines", "Do experts change the same things?",
        "Cosine between the experts' changes over all merged matrices. 1: the same change; 0: unrelated; below 0: opposed.",
        (-1.0, 1.0), "RdBu_r",
    )  # fmt: skip
    yield from _similarity(
        summary, summary.sign_conflicts, "sign-conflicts", "Where two experts changed a weight, how often did they disagree?",
        "The share of opposite signs among the weights that both changed. Half is what unrelated experts have.",
        (0.0, 1.0), "RdBu_r",
    )  # fmt: skip
    chance = summary.chance_overlap
    if chance is not None:
        yield from _similarity(
            summary, summary.overlaps, "overlap", "Do experts read the same inputs?",
            "How much of one expert's leading 5% of input directions lies within another's, the mean over matrices. Unrelated "
            "experts "
            f"would have {chance:.2f}.",
            (0.0, 1.0), "viridis",
        )  # fmt: skip


def _similarity(
    summary: Summary, matrix: Matrix, name: str, title: str, caption: str, extent: tuple[float, float], colours: str
) -> Iterator[Figure]:
    ranked = pairs(matrix)
    if not ranked:
        return
    experts = summary.diagnosis.experts
    (low, a, b), (high, c, d) = ranked[0], ranked[-1]
    told = f"From {low:.2f} ({experts[a]} and {experts[b]}) to {high:.2f} ({experts[c]} and {experts[d]})."
    without_self = [[None if s == t else value for t, value in enumerate(row)] for s, row in enumerate(matrix)]
    chart = HeatMap(without_self, experts, experts, *extent, colours)
    yield Figure(name, title, caption, f"A table of experts by experts. {told}", partial(heat_map, chart))


def _distributions(summary: Summary) -> Iterator[Figure]:
    """The paper's histograms (assumption A3)."""
    diagnosis = summary.diagnosis
    kinds = kinds_in_order(tensor.kind for tensor in diagnosis.matrices)[:_MOST_PANELS]
    centres = [-REACH + (i + 0.5) * 2 * REACH / BINS for i in range(BINS)]
    normal = Line(centres, [math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) for x in centres])
    panels = []
    for kind in kinds:
        tensors = [tensor for tensor in diagnosis.matrices if tensor.kind == kind]
        drawn = {}
        for t, expert in enumerate(diagnosis.experts):
            own = [tensor.entries.histogram[tensor.experts.index(t)] for tensor in tensors if t in tensor.experts]
            counts = [sum(column) for column in zip(*own, strict=True)]
            if sum(counts):
                drawn[expert] = Line(centres, [count / sum(counts) * BINS / (2 * REACH) for count in counts])
        panels.append(Panel(drawn, title=kind, reference=normal))
    means = [abs(m) / d for x in diagnosis.matrices for m, d in zip(x.entries.mean, x.entries.deviation, strict=True) if d]
    distances = [d for x in diagnosis.matrices for d in x.entries.normal_distance if d is not None]
    if not means:
        return
    told = (
        f"The mean is {statistics.median(means):.3f} standard deviations from zero in the median tensor, {max(means):.3f} at "
        f"most. The distance from the normal distribution function is {statistics.median(distances):.3f} in the median, "
        f"{max(distances):.3f} at most."
    )
    yield Figure(
        "distributions",
        "Are changes centred at zero, and normal?",
        "Entries of the experts' changes in standard deviations of their tensor, by kind of matrix; dashed: the normal curve. "
        + told,
        told,
        partial(lines, panels),
    )


def _spectra(summary: Summary) -> Iterator[Figure]:
    """The paper's figure of spectral refinement, of layers where it happens."""
    refined = [
        (x, x.spectra) for x in summary.diagnosis.matrices if x.heterogeneous and x.spectra and summary.diagnosis.ace["refine"]
    ]
    if not refined:
        return
    kinds = kinds_in_order(tensor.kind for tensor, _ in refined)[:_MOST_PANELS]
    panels = []
    for tensor, spectra in (_middle([entry for entry in refined if entry[0].kind == kind]) for kind in kinds):
        drawn = {"P, before refinement": _curve(spectra.plain), "M, after": _curve(spectra.merged)}
        title = tensor.kind if tensor.depth is None else f"{tensor.kind}, layer {tensor.depth}"
        panels.append(Panel(drawn, title=title, x_label="share of directions", logarithmic=True))
    told = (
        f"{len(refined)} of {len(summary.diagnosis.matrices)} matrices are refined. There the top 5% of singular values hold "
        f"{_range(s.plain.leading_energy for _, s in refined)} of P's energy and "
        f"{_range(s.merged.leading_energy for _, s in refined)} of M's; the first singular vectors of P and M have a cosine of "
        f"{_range((s.leading_cosine for _, s in refined), '.3f')}."
    )
    yield Figure(
        "spectra",
        "What spectral refinement does",
        "Singular values of ACE's closed form P and of the final M. Of each kind, the middle one of the layers that ACE refines; "
        f"kinds that it refines nowhere are left out. {told}",
        told,
        partial(lines, panels),
    )


def _concentration(summary: Summary) -> Iterable[Figure]:
    points = _points(summary.diagnosis.matrices, lambda tensor: tensor.spectra.plain.leading_energy if tensor.spectra else None)
    caption = "The share of P's energy in the top 5% of its singular values, by layer and kind."
    return depth_figure("concentration", "How concentrated the closed form is", caption, points, "share of energy")


def _curve(spectrum: Spectrum) -> Line:
    return Line(spectrum.share, spectrum.values)


def _middle(refined: Sequence[tuple[TensorDiagnosis, Spectra]]) -> tuple[TensorDiagnosis, Spectra]:
    return sorted(refined, key=lambda entry: entry[0].depth or 0)[len(refined) // 2]


def _range(values: Iterable[float], form: str = ".0%") -> str:
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"


def _ridge(summary: Summary) -> Iterable[Figure]:
    points = _points(summary.diagnosis.matrices, lambda tensor: tensor.ridge_share)
    return regulariser_figure(points, f"{summary.diagnosis.ace['epsilon']:g}")


_FIGURES: tuple[Callable[[Summary], Iterable[Figure]], ...] = (
    _heterogeneity, _forecasts, _changes, _similarities, _ridge, _spectra, _distributions, _concentration
)  # fmt: skip
_OF_ACE = (_heterogeneity, _ridge, _spectra, _concentration)
"""About nothing that will happen where a merge by ACE is not thought of."""
