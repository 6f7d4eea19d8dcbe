"""`acemerge bench SUITE`: train what is missing, merge by every method, evaluate, write the table."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from acemerge.bench.analyses.variants import ANALYSES
from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, measure_all
from acemerge.bench.suites.registry import Suite
from acemerge.bench.tables.paper import PaperRow, paper_rows
from acemerge.bench.tables.tables import Row, Table
from acemerge.methods import all_methods, get_method
from acemerge.version import __version__

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.5)
"""Multiples of a method's own default scale that validation rows choose from."""


def default_methods(experts: int) -> list[str]:
    """Every registered method that takes this number of experts and needs their weights alone."""
    return [method.name for method in all_methods() if method.experts in (None, experts) and method.uses == "weights"]


def rows_of(suite: Suite, candidates: Sequence[Candidate], seeds: Sequence[int], limit: int | None, say: Say) -> tuple[Row, ...]:
    """Measure the candidates, and the experts to compare them with."""
    suite.prepare(seeds, say)
    wanted = [EXPERTS, *(candidate for candidate in candidates if candidate != EXPERTS)]
    jobs = [Job(suite, candidate, seed, limit) for candidate in wanted for seed in seeds]
    results = measure_all(jobs, say)
    by_candidate = [tuple(results[i : i + len(seeds)]) for i in range(0, len(results), len(seeds))]
    rows = {c.label: Row(c, found, by_candidate[0]) for c, found in zip(wanted, by_candidate, strict=True)}
    return tuple(rows[candidate.label] for candidate in candidates)


def describe_run(suite: Suite, seeds: Sequence[int], limit: int | None, with_experts: bool = True) -> dict[str, Any]:
    """What is needed to repeat the run; with the hashes of the experts, if they were given and have a part in it."""
    about = {
        "suite": suite.name,
        "seeds": ", ".join(map(str, seeds)),
        "test_rows_per_task": "all" if limit is None else f"at most {limit}",
        "metric": _metric(suite),
        "data": "none but for rows marked as using data, which see training rows of the tasks without their labels",
        "merged_tensors": "as the preset of the base's model type says; canonical orientation unless stated; heads never",
        "standard_error": "of the average, from the number of test rows and, with several seeds, the spread over seeds",
        "command": " ".join(["acemerge", *sys.argv[1:]]),
        "versions": versions(),
    }
    if suite.given is None:
        return about
    del about["seeds"]
    return {**about, **(suite.given.identity(suite.tasks) if with_experts else {})}


def _metric(suite: Suite) -> str:
    names = {task.name: task.metric for task in suite.tasks}
    if set(names.values()) == {"loss"}:
        what = "loss per token on held-out texts, in percent of the way from the base's loss to the expert's"
    elif set(names.values()) != {"accuracy"}:
        what = ", ".join(f"{task} {metric.replace('_', ' ')}" for task, metric in names.items())
    else:
        what = "accuracy in percent" + (" under each expert's own head" if suite.own_heads else "")
    return f"{what}; of experts: mean share of each expert's score kept, the expert measured in the same run"


def versions() -> str:
    """Of what a result depends on."""
    import transformers

    return (
        f"acemerge {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def compare(
    suite: Suite, methods: Sequence[str], seeds: Sequence[int], limit: int | None, validated: Sequence[str], say: Say
) -> Table:
    """The table of one suite."""
    candidates = [BASE, EXPERTS, *(Candidate(name, {"method": get_method(name).name}) for name in methods)]
    suite.prepare(seeds, say)
    candidates += [choose_alpha(suite, name, seeds, limit, say) for name in validated]
    rows = rows_of(suite, candidates, seeds, limit, say)
    return Table(
        f"Merged models of {suite.name}", describe_run(suite, seeds, limit), with_paper(suite, rows), normalised=suite.normalised
    )


def with_paper(suite: Suite, rows: Sequence[Row], table: str = "main") -> tuple[Row, ...]:
    """The rows with what the paper has for them."""
    theirs = rows_in_paper(suite, table)
    return tuple(replace(row, paper=theirs.get(row.candidate.label)) for row in rows)


def rows_in_paper(suite: Suite, table: str) -> dict[str, PaperRow]:
    """Of one of the paper's tables. Its GPT-2 was measured on MNLI mismatched, as the authors' script has it."""
    return paper_rows(suite.name.removesuffix("-mm"), table, [task.name for task in suite.tasks])


def choose_alpha(suite: Suite, method: str, seeds: Sequence[int], limit: int | None, say: Say) -> Candidate:
    """The method with the scale that is best on validation rows, the same for all seeds."""
    default = float(next(option.default for option in get_method(method).describe_options() if option.name == "alpha"))
    tried = [Candidate(f"{method} alpha={default * m:g}", {"method": method, "alpha": default * m}) for m in ALPHAS]
    results = measure_all([Job(suite, c, seed, limit, "validation") for c in tried for seed in seeds], say)
    totals = [sum(r.average for r in results[i : i + len(seeds)]) for i in range(0, len(results), len(seeds))]
    best = tried[totals.index(max(totals))]
    offered = ", ".join(f"{default * m:g}" for m in ALPHAS)
    return Candidate(f"{method} (validated)", best.request, f"alpha chosen among {offered} on validation rows")


def analyse(suite: Suite, name: str, seeds: Sequence[int], limit: int | None, say: Say) -> Table:
    """The table of one of the paper's analyses."""
    rows = with_paper(suite, rows_of(suite, ANALYSES[name](), seeds, limit, say), name)
    about = describe_run(suite, seeds, limit)
    return Table(f"{name.capitalize()} on {suite.name}", about, rows, ranked=False, normalised=suite.normalised)
