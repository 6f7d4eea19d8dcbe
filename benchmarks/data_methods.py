"""Rows of methods that use data, with options that `acemerge bench` does not take: what they learn, and from which rows.

    python benchmarks/data_methods.py text-8 --rows adamerging_task,adamerging_layer --steps 500
    python benchmarks/data_methods.py text-8 --rows df_merge --trials 20          # scales chosen on validation rows
    python benchmarks/data_methods.py text-8 --rows mingle

Experts of seed 0, trained if they are not there. What is done is kept, as in the bench; the table has every row asked for.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from validation_scores import validation_scores

import acemerge
from acemerge.bench.measure.compare import describe_run, rows_of
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.bench.tables.show import publish_table
from acemerge.bench.tables.tables import Table

LEARNT = "learnt on unlabelled training rows"


def dynamic_fisher(suite: Suite, folder: Path, trials: int, rows: int) -> Candidate:
    """The scales that optuna finds best on validation rows; information is measured on 30 rows of each task, as in the paper."""
    fixed = {"alpha": float(len(suite.folders(0))), "rows": 30}
    found = acemerge.sweep(
        suite.experts(0).base, suite.folders(0), folder, {"scales": "0..1"}, "fisher", data=suite, search=trials,
        evaluate=partial(validation_scores, suite, rows), keep="none", options=fixed, **suite.merge,
    )  # fmt: skip
    assert found.best is not None
    request = {"method": "fisher", "scales": list(found.best.settings["scales"]), **fixed}
    chosen = f"scales chosen by optuna in {trials} trials on {rows} validation rows of each task; information on training rows"
    return Candidate("df_merge", request, chosen)


def candidates(names: list[str], suite: Suite, given: argparse.Namespace) -> list[Candidate]:
    """What is asked for, by name; any other name is a method with its defaults."""
    found = []
    for name in names:
        if name.startswith("adamerging_"):
            plus_plus, granularity = "plus_plus" in name, name.rsplit("_", 1)[1]
            request = {"method": "adamerging", "granularity": granularity, "plus_plus": plus_plus, "steps": given.steps}
            found.append(Candidate(name, request, LEARNT))
        elif name == "df_merge":
            found.append(dynamic_fisher(suite, given.folder / f"df_merge-{suite.name}", given.trials, given.validation))
        elif name == "mingle":
            found.append(Candidate(name, {"method": name}, LEARNT))
        else:
            found.append(Candidate(name, {"method": name}))
    return found


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--rows", default="adamerging_task,adamerging_layer,adamerging_plus_plus_task,adamerging_plus_plus_layer")
    parser.add_argument("--steps", type=int, default=500, help="of AdaMerging")
    parser.add_argument("--trials", type=int, default=20, help="of dynamic Fisher's search")
    parser.add_argument("--validation", type=int, default=100, help="rows of each task that the search scores on")
    parser.add_argument("--limit", type=int, default=200, help="test rows of each task")
    parser.add_argument("--folder", type=Path, default=Path("bench-output"))
    given = parser.parse_args()
    suite = get_suite(given.suite)
    suite.prepare([0], print)
    chosen = [BASE, EXPERTS, *candidates(given.rows.split(","), suite, given)]
    rows = rows_of(suite, chosen, [0], given.limit, print)
    table = Table(f"Methods that use data on {suite.name}", describe_run(suite, [0], given.limit), rows)
    publish_table(table, given.folder, f"data-{suite.name}")


if __name__ == "__main__":
    main()
