"""Where a method's data comes from: the training rows of one of the bench's suites, or a folder with a file per expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from acemerge.calibration.files import A_FILE_EACH, FileData
from acemerge.calibration.inputs import Batch, Inputs
from acemerge.calibration.suite import Suite, find_suite
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.source import expand_home
from acemerge.errors import InputError, did_you_mean, first_line
from acemerge.planning.data import PlannedData


@runtime_checkable
class Data(PlannedData, Protocol):
    """Inputs of every expert's task, and how its model answers them. Labels are never read."""

    @property
    def reader(self) -> str:
        """By what the models are loaded and their answers read: the same inputs may mean other answers elsewhere."""

    def inputs(self, expert: Checkpoint, rows: int) -> Inputs:
        """The first so many rows of this expert's task."""

    def outline(self, expert: Checkpoint) -> nn.Module:
        """The expert's model, whose tensors may be without values."""

    def load(self, expert: Checkpoint) -> nn.Module:
        """The expert's model with its own head."""

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model; what comes out is nobody's business here."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """[row, class], or [row, token, class] of a model that answers for every token."""


@dataclass(frozen=True)
class SuiteData:
    """The training rows of a suite. An expert is called as the suite calls it: mostly as its task."""

    suite: Suite
    _inputs: dict[tuple[str, int], Inputs] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """The suite, and which of its rows."""
        return f"{self.suite.name}, training rows"

    @property
    def record(self) -> dict[str, Any]:
        """With the package that each task's rows come from."""
        return {"about": self.about, "sources": {task.name: task.source for task in self.suite.tasks}}

    @property
    def reader(self) -> str:
        """The suite's domain."""
        return f"domain {self.suite.domain.name}"

    def inputs(self, expert: Checkpoint, rows: int) -> Inputs:
        """Never test rows, never validation rows."""
        key = (expert.name, rows)
        if key not in self._inputs:
            task = next(task for task in self.suite.tasks if task.expert == expert.name)
            self._inputs[key] = Inputs(self.suite.domain.prepare(task.load().train.first(rows)))
        return self._inputs[key]

    def outline(self, expert: Checkpoint) -> nn.Module:
        """The suites' models are small: with values."""
        return self.load(expert)

    def load(self, expert: Checkpoint) -> nn.Module:
        """As the suite's domain says."""
        if expert.folder is None:
            raise InputError(f"expert {expert.where}: give the expert's folder, with its config, to run it on the suite's rows")
        try:
            return self.suite.domain.load(expert.folder).eval()
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            raise InputError(f"expert {expert.where}: not a model of suite '{self.suite.name}' ({first_line(error)})") from None

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """With the head, which does no harm."""
        return self.suite.domain.logits(model, batch)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """[row, class]."""
        return self.suite.domain.logits(model, batch)


def open_data(given: str | Suite, base: Checkpoint, experts: Sequence[Checkpoint], relative_to: Path = Path()) -> Data:
    """The data that `--data` names, checked as far as it can be without running a model."""
    if not isinstance(given, str):
        return _of_suite(given, experts)
    folder = relative_to / expand_home(Path(given))
    if folder.is_dir():
        return FileData.open(folder, base, experts)
    return _of_suite(_suite(given), experts)


def _suite(given: str) -> Suite:
    try:
        return find_suite(given)
    except ImportError as error:
        raise InputError(f"--data {given}: the suites need {error.name}: pip install 'acemerge[bench]'") from None
    except InputError as error:
        raise InputError(f"--data {given}: no such folder, and {error}. Give a suite, or a folder with {A_FILE_EACH}") from None


def _of_suite(suite: Suite, experts: Sequence[Checkpoint]) -> SuiteData:
    known = [task.expert for task in suite.tasks]
    for expert in experts:
        if expert.name not in known:
            raise InputError(
                f"--data {suite.name}: has no task for expert {expert.where}; name the expert after its task in a recipe "
                f"(name: ...), or give a folder with a file per expert; {did_you_mean(expert.name, known)}"
            )
    return SuiteData(suite)
