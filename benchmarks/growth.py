"""How time and peak memory grow with the number of experts, the number of layers and the width of a layer.

    python benchmarks/growth.py          # some minutes; 3 GB of disk

Every point is a whole `acemerge.merge` in a process of its own, start-up excluded: one thread, Llama shapes, bfloat16. Time is
the processor's, hashing included, which other programs disturb less. Memory is anonymous and beyond what the process took before.
A row of the table says by what factor a doubling multiplies time and memory: 1 is flat, 2 is linear, 8 is cubic. Writes
the figures as JSON and a plot.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from footprint import watch
from llamas import Llama, warm, write_models
from record import FOLDER, machine, print_table, save

METHODS = ("task_arithmetic", "ties", "tsv_m", "ace")
SERIES: dict[str, tuple[str, list[Llama]]] = {
    "experts": ("experts", [Llama(1, 512, 1408, 8000, experts) for experts in (2, 4, 8, 16, 32)]),
    "layers": ("layers of one width", [Llama(layers, 512, 1408, 8000, 4) for layers in (1, 2, 4, 8)]),
    "width": ("width of the layer", [Llama(1, width, 11 * width // 4, 4000, 4) for width in (128, 256, 512, 1024)]),
}
_CHILD = """
import os, sys, time
os.environ |= {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line does
import torch, acemerge, acemerge.execute.pipeline
folder, method, experts = sys.argv[1], sys.argv[2], sys.argv[3:]
acemerge.merge_task_vectors(torch.randn(2, 64, 64), method=method)
print("ready", flush=True); sys.stdin.readline(); started = time.process_time()
acemerge.merge(f"{folder}/base", [f"{folder}/{name}" for name in experts], f"{folder}/merged", method=method, threads=1)
print("done", time.process_time() - started, flush=True); sys.stdin.readline()
"""


@dataclass(frozen=True)
class Point:
    """One merge: its method, what is varied and its value, and what it took."""

    series: str
    method: str
    value: int
    model_bytes: int
    seconds: float
    peak: int


def measure(series: str, llama: Llama, folder: Path, repeats: int) -> list[Point]:
    """All methods on one set of models, in turn."""
    write_models(llama, folder)
    warm(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    runs: dict[str, list[tuple[float, int]]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method in METHODS:
            found = watch(_CHILD, str(folder), method, *llama.expert_names, environment=environment)
            runs[method].append((float(found.report), found.peak - found.before))
            shutil.rmtree(folder / "merged")
    value = {"experts": llama.experts, "layers": llama.layers, "width": llama.hidden}[series]
    return [
        Point(series, method, value, 2 * llama.elements, statistics.median(s for s, _ in own), max(peak for _, peak in own))
        for method, own in runs.items()
    ]


def doublings(points: Sequence[Point], series: str, method: str) -> tuple[float, float]:
    """By what factor the last doubling multiplies time and memory."""
    own = [point for point in points if point.series == series and point.method == method]
    return own[-1].seconds / own[-2].seconds, own[-1].peak / own[-2].peak


def plot(points: Sequence[Point], path: Path) -> None:
    """Time above, memory below, a column for each of what is varied; both axes logarithmic."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    figure, axes = plt.subplots(2, len(SERIES), figsize=(11, 6), sharex="col", sharey="row", layout="constrained")
    for column, (series, (label, _)) in enumerate(SERIES.items()):
        for method in METHODS:
            own = [point for point in points if point.series == series and point.method == method]
            values = [point.value for point in own]
            axes[0, column].plot(values, [point.seconds for point in own], marker="o", label=method)
            axes[1, column].plot(values, [point.peak / 1e6 for point in own], marker="o", label=method)
        for row in (0, 1):
            axes[row, column].set(xscale="log", yscale="log")
            axes[row, column].grid(alpha=0.3)
        ticks = sorted({point.value for point in points if point.series == series})
        axes[1, column].xaxis.set(major_locator=FixedLocator(ticks), major_formatter=FixedFormatter(list(map(str, ticks))))
        axes[1, column].xaxis.set_minor_locator(NullLocator())
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("processor seconds")
    axes[1, 0].set_ylabel("peak memory, MB")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
    figure.savefig(path)


def main() -> None:
    """Measure every series, print, plot, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    parser.add_argument("--json", type=Path, default=FOLDER / "growth.json")
    given = parser.parse_args()
    where = machine()
    points: list[Point] = []
    for series, (_, llamas) in SERIES.items():
        for llama in llamas:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                points += measure(series, llama, Path(folder), given.repeats)
    table: list[list[Any]] = []
    for method in METHODS:
        factors = [doublings(points, series, method) for series in SERIES]
        table.append([f"`{method}`", *(f"{factor:.2f}" for pair in factors for factor in pair)])
    print_table(["a doubling of", *(f"{series}, {what}" for series in SERIES for what in ("time", "memory"))], table)
    save(given.json, where, {"points": [asdict(point) for point in points]})
    plot(points, given.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
