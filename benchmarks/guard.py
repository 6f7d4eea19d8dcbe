"""How far merges went, beside whether they beat averaging: what docs/guard.md rests on.

    python benchmarks/guard.py chosen docs/results/search                # the candidates of the search, on validation rows
    python benchmarks/guard.py shown bench-output/lora-digits.json ...   # methods as a bench measured them, on test rows

`shown` merges the first set of the suite's experts again by every method of the table, and needs them in the cache.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acemerge.bench.measure.merging import merge_experts
from acemerge.bench.suites.registry import get_suite
from acemerge.output.manifest import read_merge
from acemerge.output.overreach import overreach, reach

WORSE = -0.01
"""Below averaging by more than a point."""
SHARES = {"lora-digits": 40 / 96, "lora-text-8": 128 / 384}
"""Of directions, in the search's LoRA suites: ranks of all experts over the width."""


@dataclass(frozen=True)
class Merge:
    """One measured merge."""

    suite: str
    name: str
    times: float
    """Of what the guard allows."""
    gain: float
    """Over averaging."""


def chosen(folder: Path) -> Iterator[Merge]:
    """The search keeps the length of the middle layer, in an expert's; a candidate with k = 0.35 tells the base's."""
    for file in sorted(folder.glob("*.json")):
        measured = json.loads(file.read_text(encoding="utf-8"))
        suite = file.stem.split("_seed")[0]
        base = measured["closed form; p 0.5; k 0.35"]["length"] ** 2 / 0.35
        allowed = max(1.0, reach(base, 1.0, SHARES.get(suite, 1.0)))
        for name, own in measured.items():
            if name != "mean":
                yield Merge(suite, name, own["length"] / allowed, own["average"] - measured["mean"]["average"])


def shown(file: Path) -> Iterator[Merge]:
    """Every method of a table but averaging and what is no merge."""
    table = json.loads(file.read_text(encoding="utf-8"))
    suite = get_suite(table["suite"])
    rows = {row["row"]: row for row in table["rows"]}
    average = rows["average"]["average"]
    for name, row in rows.items():
        if row.get("request") and name not in ("base", "average") and not row["per_task"] and row["uses"] == "weights":
            times = _times(suite, row["request"])
            if not math.isnan(times):
                yield Merge(table["suite"], name, times, row["average"] - average)


def _times(suite: Any, request: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = merge_experts(suite.experts(0).base, suite.folders(0), Path(folder) / "merged", {**suite.merge, **request})
        times = overreach(result.plan, read_merge(result.output).tensors)
    return math.nan if times is None else times


def show(merges: list[Merge]) -> None:
    """One line for each merge that says anything, and the rates."""
    for merge in merges:
        print(f"| {merge.suite} | {merge.name} | {merge.times:.2f} | {100 * merge.gain:+.1f} |")
    warned = [merge for merge in merges if merge.times > 1]
    better = [merge for merge in merges if merge.gain >= 0]
    print(
        f"{len(merges)} merges; warned of {len(warned)}, of which {sum(merge.gain < 0 for merge in warned)} are below averaging"
    )
    print(f"false alarms: {sum(merge.gain >= 0 for merge in warned)} of the {len(better)} that are not below averaging")
    for loss in (WORSE, -0.03, -0.05, -0.10):
        worse = [merge for merge in merges if merge.gain < loss]
        print(f"more than {-100 * loss:.0f} points below: {sum(merge.times > 1 for merge in worse)} of {len(worse)} warned of")


def main() -> None:
    """See above."""
    what, *paths = sys.argv[1:]
    read = {"chosen": chosen, "shown": shown}[what]
    show([merge for path in paths for merge in read(Path(path))])


if __name__ == "__main__":
    main()
