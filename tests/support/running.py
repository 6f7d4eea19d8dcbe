"""The command line in this process, merges included: a process of its own for each would take most of the time of a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from acemerge.bench.measure import evaluation, run
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.cli.app import main


def run_command(patch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Its exit code."""
    evaluation._prepared.clear()
    patch.setattr(run, "measured_merge", merge_here)
    patch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def rows_in(file: Path) -> dict[str, Any]:
    """The rows of a table that a command wrote, by their names."""
    return {row["row"]: row for row in json.loads(file.read_text())["rows"]}
