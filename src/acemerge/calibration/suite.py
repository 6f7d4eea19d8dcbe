"""A suite as `--data` uses it: tasks with training rows, and how models of their kind are loaded and asked.

The suites themselves are in a layer above, which offers them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from acemerge.calibration.inputs import Batch, Prepared


class TrainingRows(Protocol):
    """Rows to learn from, as their suite keeps them."""

    def first(self, count: int) -> Any:
        """At most so many, for the domain to prepare."""


class TaskRows(Protocol):
    """A task's rows. There are others, which no method may see."""

    @property
    def train(self) -> TrainingRows:
        """To learn from."""


class SuiteTask(Protocol):
    """What one expert was trained for."""

    @property
    def name(self) -> str:
        """The task's own."""

    @property
    def expert(self) -> str:
        """The name of the expert that knows this task."""

    @property
    def source(self) -> str:
        """Where the data come from, for the record."""

    @property
    def load(self) -> Callable[[], TaskRows]:
        """Reads the data; the same rows in the same order every time."""


class SuiteDomain(Protocol):
    """How a model of one kind is loaded and asked."""

    @property
    def name(self) -> str:
        """Another one may read other answers from the same inputs."""

    def load(self, folder: Path) -> nn.Module:
        """A model with its head."""

    def prepare(self, rows: Any) -> Prepared:
        """Make rows ready."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """[row, class]."""


@runtime_checkable
class Suite(Protocol):
    """Tasks whose experts are merged together."""

    @property
    def name(self) -> str:
        """What `--data` calls it."""

    @property
    def domain(self) -> SuiteDomain:
        """The same for all tasks."""

    @property
    def tasks(self) -> Sequence[SuiteTask]:
        """One or more of every expert."""


FindSuite = Callable[[str], Suite]

_offered: list[FindSuite] = []


def offer_suites(find: FindSuite) -> None:
    """Have suites found by this function; it raises InputError for a name that it does not know."""
    _offered.append(find)


def find_suite(name: str) -> Suite:
    """The suite of that name, by what was offered last."""
    return _offered[-1](name)
