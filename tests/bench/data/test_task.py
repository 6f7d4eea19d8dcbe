"""Rows of a task, split."""

from __future__ import annotations

from acemerge.bench.data.task import Rows, split


def test_splits_keep_test_rows_out_of_training() -> None:
    rows = Rows(["Same  words", "same words", "b", "c", "d", "e", "f"], [0, 0, 1, 1, 0, 1, 0])
    splits = split(rows, Rows(["SAME WORDS", "new", "new"], [0, 1, 1]), validation_rows=2)
    assert splits.test.inputs == ["new"]
    assert len(splits.validation) == 2
    assert not set(splits.train.inputs) & set(splits.validation.inputs)
    again = split(rows, test_rows=3, validation_rows=1)
    assert again == split(rows, test_rows=3, validation_rows=1)
    assert not {" ".join(text.lower().split()) for text in again.test.inputs} & {t.lower() for t in again.train.inputs}
