"""A task: labelled rows to learn from, to choose with and to be tested on, and how long its expert trains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from acemerge.bench.measure.metrics import Metric

VALIDATION_ROWS = 400
SPLIT_SEED = 0
"""Not the run's seed: no run may train on what another run tests on."""


@dataclass(frozen=True)
class Prompts:
    """Classes in words, for models that compare a picture with a text."""

    task: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    """Sentences with {} for the class."""


@dataclass(frozen=True)
class Rows:
    """Inputs (a text, a pair of texts, an image) and the index of each one's class, or a number for a regression."""

    inputs: Sequence[Any]
    labels: Sequence[float]
    prompts: Prompts | None = None
    """Where the classes are given in words, and not by a head of the model."""

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, count: int | None) -> Rows:
        """At most so many rows; all without a number."""
        return Rows(self.inputs[:count], self.labels[:count], self.prompts)


class SplitRows(Protocol):
    """Validation rows are cut from the training rows; nothing is ever chosen by test rows."""

    @property
    def train(self) -> Rows:
        """To learn from."""

    @property
    def validation(self) -> Rows:
        """To choose by."""

    @property
    def test(self) -> Rows:
        """To be measured on."""


@dataclass(frozen=True)
class Splits:
    """All three in memory. See `SplitRows`."""

    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True)
class Task:
    """What an expert is measured on."""

    name: str
    classes: tuple[str, ...]
    """Of a classification."""
    load: Callable[[], SplitRows]
    """Reads the data; the same rows in the same order every time."""
    source: str
    """Where the data come from, for the record."""
    _: KW_ONLY
    metric: Metric = "accuracy"
    taught: str | None = None
    """The expert that knows this task, where it is not called as the task."""

    @property
    def expert(self) -> str:
        """The name of the expert that knows this task."""
        return self.taught or self.name


@dataclass(frozen=True)
class TrainedTask(Task):
    """A task whose expert is trained here, and how long it trains."""

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
