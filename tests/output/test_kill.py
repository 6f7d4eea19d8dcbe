"""Every verb, disturbed: a few trials of each way on the quick ones. `make kill` tries all verbs, at each operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from file_faults import compiler

HARNESS = Path(__file__).parents[1] / "support/kill_harness.py"
QUICK = ("merge --overwrite", "sweep --evaluate", "task", "recipe convert")

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs Linux and a C compiler")


def disturb(*arguments: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(HARNESS.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(HARNESS), *arguments], env=environment, capture_output=True, text=True, check=False, timeout=900
    )


def test_what_is_disturbed_leaves_nothing_half_made_and_goes_on() -> None:
    ended = disturb("--most", "1", *(part for verb in QUICK for part in ("--verb", verb)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == list(QUICK)
    assert ended.stdout.count("killed 1") == len(QUICK) - 1  # one only prints


def test_carelessness_is_found() -> None:
    """A command that writes its file where it belongs, piece by piece."""
    ended = disturb("--verb", "careless", "--way", "kill", "--way", "disk")
    assert ended.returncode == 1
    assert "SIGTERM at operation 2: page.html is neither old nor new, 0 bytes" in ended.stdout
    assert "BROKEN careless, full disk of 1 pages" in ended.stdout
