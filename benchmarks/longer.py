"""A suite whose experts train several times as long as usual: what merging makes of experts that went further.

    python benchmarks/longer.py demo --times 4 --limit 300
    python benchmarks/longer.py lora-digits --times 4 --limit 400

The experts are kept beside the usual ones, in models/<domain>-x4 of the cache.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from acemerge.bench.data.task import TrainedTask
from acemerge.bench.measure.compare import compare
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.bench.tables.show import publish_table

METHODS = "ace_auto,ace,average,tsv_m,iso_cts,task_arithmetic,cart"


def longer(suite: Suite, times: int) -> Suite:
    """The same tasks with so many times the passes over their rows, and a place of their own for base and experts."""
    tasks = tuple(replace(task, epochs=times * task.epochs) for task in cast(tuple[TrainedTask, ...], suite.tasks))
    name = f"{suite.domain.name}-x{times}"
    if is_dataclass(suite.domain):
        domain: Any = replace(cast(Any, suite.domain), name=name)
    else:
        domain = copy.copy(suite.domain)
        domain.name = name
    return replace(suite, name=f"{suite.name}-x{times}", domain=domain, tasks=tasks)


def main() -> None:
    """Train, merge, measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--limit", type=int, default=300, help="test rows of each task, at most")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("-o", "--output", type=Path, default=Path("bench-output"))
    given = parser.parse_args()
    suite = longer(get_suite(given.suite), given.times)
    table = compare(suite, given.methods.split(","), [0], given.limit, [], lambda text: print(text, flush=True))
    publish_table(table, given.output, suite.name)


if __name__ == "__main__":
    main()
