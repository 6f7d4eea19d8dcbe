"""A task: labelled rows to learn from, to choose with and to be tested on, and how long its expert trains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VALIDATION_ROWS = 400
SPLIT_SEED = 0
"""Not the run's seed: no run may train on what another run tests on."""


@dataclass(frozen=True)
class Rows:
    """Inputs (a text, a pair of texts, an image array) and the index of each one's class."""

    inputs: Sequence[Any]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, count: int) -> Rows:
        """At most so many rows."""
        return Rows(self.inputs[:count], self.labels[:count])


@dataclass(frozen=True)
class Splits:
    """Validation rows are cut from the training rows; nothing is ever chosen by test rows."""

    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True)
class Task:
    """What an expert learns."""

    name: str
    classes: tuple[str, ...]
    load: Callable[[], Splits]
    """Reads the packages; the same rows in the same order every time."""
    source: str
    """Package and version, for the record."""
    train_rows: int
    batch_size: int
    learning_rate: float
    epochs: int = 1


def split(train: Rows, test: Rows | None = None, *, test_rows: int = 0, validation_rows: int = VALIDATION_ROWS) -> Splits:
    """Shuffle, cut test rows from the training rows where there is no official test, then cut the validation rows.

    Test rows whose input also occurs among the training rows are left out, and so are repeated ones.
    """
    generator = random.Random(SPLIT_SEED)
    train = _shuffled(train, generator)
    if test is None:
        test, train = _take(train, 0, test_rows), _take(train, test_rows, len(train))
    else:
        test = _shuffled(test, generator)
    seen = set(map(_identity, train.inputs))
    fresh = []
    for index, identity in enumerate(map(_identity, test.inputs)):
        if identity not in seen:
            seen.add(identity)
            fresh.append(index)
    test = Rows([test.inputs[i] for i in fresh], [test.labels[i] for i in fresh])
    return Splits(_take(train, validation_rows, len(train)), _take(train, 0, validation_rows), test)


def _take(rows: Rows, start: int, stop: int) -> Rows:
    return Rows(rows.inputs[start:stop], rows.labels[start:stop])


def _shuffled(rows: Rows, generator: random.Random) -> Rows:
    order = list(range(len(rows)))
    generator.shuffle(order)
    return Rows([rows.inputs[i] for i in order], [rows.labels[i] for i in order])


def _identity(value: Any) -> Any:
    """What makes two inputs the same: an array's bytes, or the words of a text whatever its spacing and case."""
    if hasattr(value, "tobytes"):
        return value.tobytes()
    if isinstance(value, str):
        return " ".join(value.lower().split())
    return tuple(map(_identity, value)) if isinstance(value, tuple) else value
