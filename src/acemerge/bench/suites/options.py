"""What a command can say about a suite: where its models and data are, and what to compute on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from acemerge.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from acemerge.bench.measure.evaluation import Compute


class Named(Protocol):
    """A task, or a description of one."""

    @property
    def name(self) -> str:
        """As --tasks calls it."""


AnyTask = TypeVar("AnyTask", bound=Named)


@dataclass(frozen=True)
class SuiteOptions:
    """For the paper's suites. Without `models` and `data`, both come from the hub."""

    models: Path | None = None
    data: Path | None = None
    tasks: tuple[str, ...] = ()
    """Only these; all without."""
    device: str = "cpu"
    batch_size: int | None = None
    run_generated_code: bool = False

    def compute(self, batch_size: int) -> Compute:
        """One process with all its threads, which suits large models and a GPU; the batch size unless one was given."""
        from acemerge.bench.measure.evaluation import Compute

        return Compute(self.device, self.batch_size or batch_size, workers=1)

    def choose(self, tasks: Sequence[AnyTask], suite: str) -> tuple[AnyTask, ...]:
        """The tasks that were asked for, in the suite's order."""
        known = [task.name for task in tasks]
        for name in self.tasks:
            if name not in known:
                raise InputError(f"suite {suite} has no task '{name}': {did_you_mean(name, known)}")
        return tuple(task for task in tasks if not self.tasks or task.name in self.tasks)

    def refuse_for_trained(self, suite: str) -> None:
        """Suites whose experts are trained here take neither models nor data."""
        for option, given in (("--models", self.models), ("--data", self.data)):
            if given is not None:
                raise InputError(f"{option} {given}: {suite} trains its own experts on data from packages; leave {option} out")


FROM_THE_HUB = SuiteOptions()
