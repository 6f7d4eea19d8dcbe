"""In how many trials `sweep --search` finds the best of a grid of 45 points, on validation rows of text-8.

    python benchmarks/search_trials.py FOLDER         # 45 merges, 36,000 rows; repeated, it goes on

The grid is merged and scored once, on 100 validation rows of each task, with the suite's first experts (trained if they are not
there). Searches with other seeds then choose from the same points, and are told the scores that are known: what a search
tries does not depend on where a score comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from record import FOLDER, machine, save
from validation_scores import validation_scores

import acemerge
from acemerge.bench.suites.registry import get_suite
from acemerge.methods import get_method
from acemerge.sweeps.search import Proposals, SearchOptions
from acemerge.sweeps.space import make_space

GRID: dict[str, list[float]] = {"epsilon": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2], "alpha": [0.75, 1.0, 1.5], "k_frac": [0.1, 0.3, 0.5]}
ROWS = 100
Point = tuple[float, ...]


def grid_scores(folder: Path) -> dict[Point, float]:
    """Every point's mean accuracy."""
    suite = get_suite("text-8")
    evaluate = partial(validation_scores, suite, ROWS)
    result = acemerge.sweep(suite.experts(0).base, suite.folders(0), folder, GRID, evaluate=evaluate, keep="none", **suite.merge)
    return {_key(point.settings): float(point.scores["mean"] or 0) for point in result.points if point.scores}


def search(scores: Mapping[Point, float], trials: int, seed: int) -> list[Point]:
    """The points that a search tries, in order."""
    proposals, tried = Proposals(make_space(get_method("ace"), GRID, experts=8), SearchOptions(trials, seed)), []
    while asked := proposals.next():
        points = [_key(point.settings) for point in asked]
        proposals.tell([scores[point] for point in points])
        tried += points
    return tried


def _key(settings: Mapping[str, Any]) -> Point:
    return tuple(float(settings[name]) for name in GRID)


def main() -> None:
    """The grid, then the searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the grid's sweep")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, default=FOLDER / "search_trials.json")
    given, where = parser.parse_args(), machine()
    scores = grid_scores(given.folder)
    best, needed, history = max(scores.values()), [], {}
    for seed in range(given.seeds):
        tried = search(scores, given.trials, seed)
        found = next((number for number, point in enumerate(tried, 1) if scores[point] == best), None)
        needed.append(found)
        history[seed] = " ".join(f"{scores[point]:.4f}" for point in tried)
        print(f"seed {seed}: the best of the grid {'not found' if found is None else f'is trial {found}'}", flush=True)
    ranked = sorted(scores.items(), key=lambda entry: -entry[1])
    print(f"best {best:.4f}: {', '.join(str(point) for point, score in ranked if score == best)}; next {ranked[:8]}")
    print(f"found in {sum(found is not None for found in needed)} of {given.seeds} searches of {given.trials} trials")
    save(
        given.json,
        where,
        {"rows": ROWS, "grid": GRID, "scores": {str(p): s for p, s in ranked}, "needed": needed, "tried": history},
    )


if __name__ == "__main__":
    main()
