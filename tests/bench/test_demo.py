"""What the demo shows besides its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_bench
from acemerge.bench.data.task import Rows, Splits
from acemerge.bench.demo import Question, first_questions, heads_of
from acemerge.errors import InputError


def test_each_task_is_shown_by_its_first_test_row_that_fits_a_line() -> None:
    rows = Rows(["long " * 30, "a short\n row", "another"], [0, 1, 0])
    none = Rows([], [])
    task = replace(tiny_bench.TASKS[0], load=lambda: Splits(none, none, rows))
    suite = replace(tiny_bench.SUITE, tasks=(task,))
    assert first_questions(suite) == [Question("first", "a short row", "one")]


def test_what_has_no_heads_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `acemerge demo` first"):
        heads_of(tmp_path)
    for task in ("b", "a"):
        (tmp_path / "heads" / task).mkdir(parents=True)
    assert heads_of(tmp_path) == ["a", "b"]
