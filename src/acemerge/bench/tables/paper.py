"""The paper's numbers (paper_tables.json, from the tables of the ACE-Merging paper), to be printed beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

PaperRow = Mapping[str, Mapping[str, float]]
"""'raw' and 'normalised' scores in percent, by task, and their 'average'. The paper has not all of them for every row."""


@cache
def paper_tables() -> dict[str, dict[str, Any]]:
    """By suite: its tasks; 'main', 'ablation' and 'sensitivity' by row; 'cost' by method."""
    tables: dict[str, dict[str, Any]] = json.loads((files(__package__) / "paper_tables.json").read_text(encoding="utf-8"))
    return tables


def paper_rows(suite: str, table: str, tasks: list[str]) -> dict[str, PaperRow]:
    """One table's rows by our names. An average over other tasks than these is left out."""
    of_suite = paper_tables().get(suite, {})
    comparable = set(tasks) == set(of_suite.get("tasks", ()))
    wanted = {*tasks, *(["average"] if comparable else [])}
    return {
        row: {kind: {name: value for name, value in scores.items() if name in wanted} for kind, scores in kinds.items()}
        for row, kinds in of_suite.get(table, {}).items()
    }
