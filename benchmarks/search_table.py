"""What the search has measured, as one table: a line for each candidate, a column for each regime.

python benchmarks/search_table.py search-output > table.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Candidates in the order of their mean rank over the regimes that have measured them all; the others below."""
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(sys.argv[1]).glob("*.json"))}
    labels = dict.fromkeys(label for measured in found.values() for label in measured)
    complete = [label for label in labels if all(label in measured for measured in found.values())]
    order = sorted(complete, key=lambda label: -sum(measured[label]["average"] for measured in found.values()))
    print("| candidate: directions; spectrum; length |", " | ".join(map(_heading, found)), "|")
    print("|---|" + "---:|" * len(found))
    for label in [*order, *(label for label in labels if label not in complete)]:
        print(f"| {label} |", " | ".join(_cell(measured.get(label)) for measured in found.values()), "|")


def _heading(regime: str) -> str:
    suite, *marks = regime.split("_")
    return " ".join([suite, *(mark for mark in marks[:-3])])


def _cell(measured: dict[str, float] | None) -> str:
    """The average in percent, and how long the change is in lengths of an expert's, the middle layer's."""
    return "" if measured is None else f"{100 * measured['average']:.1f} ({measured['length']:.1f})"


if __name__ == "__main__":
    main()
