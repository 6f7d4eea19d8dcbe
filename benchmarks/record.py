"""What a benchmark found: a Markdown table on standard output, and JSON with the date and the machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import acemerge

FOLDER = Path(__file__).parents[1] / "docs" / "performance"


def machine() -> dict[str, Any]:
    """Where and when, as far as it matters for speed."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"), "cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 1), "torch": torch.__version__, "acemerge": acemerge.__version__,
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def save(path: Path, where: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write the JSON; `where` is what `machine` said before the work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": where, **content}, indent=1) + "\n")
    print(f"\nwritten to {path}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table; the first column to the left, the others to the right."""
    print("| " + " | ".join(columns) + " |")
    print("|---" + "|---:" * (len(columns) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
