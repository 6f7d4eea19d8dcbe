"""The search for a merge that needs no tuning: many candidates on the same experts, each in seconds.

    python benchmarks/search.py --suites text-8,vision-8,gpt2-6 --limit 100 -o search-output

Decompositions of each layer's directions are made once for all candidates that use them. Rows are validation rows of the experts
of seed 0: nothing is ever chosen on test rows. What is measured is kept in OUTPUT/<regime>.json, so an interrupted search goes on
where it stopped. `--first 5` makes the first expert five times as strong, `--experts 2` takes only the first two.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from search_candidates import CANDIDATES, DIRECTIONS, Spectral, decompose
from search_layers import Regime, Strength


def main() -> None:
    """Score every candidate in every regime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="text-8,vision-8,gpt2-6")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=100, help="validation rows of each task")
    parser.add_argument("--part", choices=["validation", "test"], default="validation")
    parser.add_argument("--experts", type=int, help="only the first so many")
    parser.add_argument("--first", type=float, default=1.0, help="multiply the first expert's change")
    parser.add_argument("--only", default="*", help="candidates, by patterns of their labels, separated by |")
    parser.add_argument("-o", "--output", type=Path, default=Path("search-output"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for suite in arguments.suites.split(","):
        search(suite, arguments)


def search(suite: str, arguments: argparse.Namespace) -> None:
    """Every candidate that was not measured before in this regime."""
    strength = Strength(arguments.experts, arguments.first)
    marks = [f"T{strength.experts}"] * bool(strength.experts) + [f"first-x{strength.first:g}"] * (strength.first != 1)
    file = arguments.output / ("_".join([suite, *marks, f"seed{arguments.seed}", arguments.part, str(arguments.limit)]) + ".json")
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    asked = [c for c in CANDIDATES if any(fnmatch.fnmatch(c.label, only) for only in arguments.only.split("|"))]
    left = [c for c in asked if c.label not in known]
    if not left:
        return
    regime = Regime(suite, arguments.seed, arguments.part, arguments.limit, strength)
    for directions in dict.fromkeys(candidate.directions for candidate in left):
        found: list[Spectral] = [decompose(DIRECTIONS[directions](layer), layer) for layer in regime.layers]
        for candidate in [c for c in left if c.directions == directions]:
            started = time.monotonic()
            changes = candidate.changes(found)
            length = statistics.median(float(M.norm()) / x.rms for M, x in zip(changes, found, strict=True) if x.rms)
            scores = regime.score(changes)
            known[candidate.label] = {"average": statistics.fmean(scores.values()), "length": length, "scores": scores}
            seconds = time.monotonic() - started
            average = 100 * known[candidate.label]["average"]
            print(f"{file.stem}: {average:.1f} {length:.1f} rms: {candidate.label} ({seconds:.0f} s)", flush=True)
            file.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
