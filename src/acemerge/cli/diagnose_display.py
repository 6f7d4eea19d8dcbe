"""A diagnosis on a terminal: the verdict, what it rests on, and three small tables."""

from __future__ import annotations

from collections.abc import Sequence

from acemerge.cli.display import print_findings, print_warnings
from acemerge.cli.tables import new_console, new_table
from acemerge.diagnosis.findings import findings, verdict
from acemerge.diagnosis.measure import Diagnosis
from acemerge.diagnosis.summary import CAVEAT, Matrix, Summary
from acemerge.layer_names import kinds_in_order

_MOST_EXPERTS = 12
"""A table of pairs with more columns than this fits no terminal."""


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The short version of the report."""
    summary = Summary(diagnosis)
    found = findings(diagnosis)
    print_findings(*verdict(found), found)
    for note in diagnosis.notes:  # a merge will tell them too
        new_console().print(f"note: {note}")
    _print_experts(summary)
    _print_kinds(diagnosis)
    if 1 < len(diagnosis.experts) <= _MOST_EXPERTS:
        _print_pairs("cosine", diagnosis.experts, summary.cosines)


def print_what_is_amiss(diagnosis: Diagnosis) -> None:
    """On standard error, all that is worth a look."""
    amiss = [f"{finding.text} {finding.advice}".strip() for finding in findings(diagnosis) if finding.level != "good"]
    print_warnings(amiss, shown=len(amiss))


def _print_experts(summary: Summary) -> None:
    """How far each expert moved, and how far each candidate would be from it."""
    candidates = list(summary.forecasts)
    grid = new_table("expert", "|D|/|W0|", *candidates, right=["|D|/|W0|", *candidates])
    for t, expert in enumerate(summary.diagnosis.experts):
        row = [_number(summary.interference(candidate, t)) for candidate in candidates]
        grid.add_row(expert, f"{summary.relative_changes[t]:.2%}", *row)
    if candidates:
        grid.add_row("all together", "", *(_number(summary.forecasts[candidate]) for candidate in candidates))
    console = new_console()
    console.print(grid)
    if candidates:
        console.print(f"under each method: its distance from the expert under ACE's own objective. {CAVEAT}")


def _print_kinds(diagnosis: Diagnosis) -> None:
    grid = new_table("kind", "matrices", "gamma", "heterogeneous", "ridge share", right=["matrices"])
    for kind in kinds_in_order(tensor.kind for tensor in diagnosis.matrices):
        own = [tensor for tensor in diagnosis.matrices if tensor.kind == kind]
        gammas = [tensor.gamma for tensor in own if tensor.gamma is not None]
        ridges = [tensor.ridge_share for tensor in own if tensor.ridge_share is not None]
        grid.add_row(kind, str(len(own)), _extent(gammas), str(sum(tensor.heterogeneous for tensor in own)), _extent(ridges))
    new_console().print(grid)


def _print_pairs(name: str, experts: Sequence[str], matrix: Matrix) -> None:
    grid = new_table(name, *experts, right=experts)
    for s, row in enumerate(matrix):
        grid.add_row(experts[s], *("" if s == t else _number(value) for t, value in enumerate(row)))
    new_console().print(grid)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:z.2f}"


def _extent(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""
