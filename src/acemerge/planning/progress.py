"""Progress on long work: a live bar on a terminal, sparse plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol

from acemerge.errors import printable
from acemerge.planning.estimates import input_bytes, work
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.sizes import human_bytes


class Progress(Protocol):
    """What the engine reports to."""

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""

    def say(self, message: str) -> None:
        """A new phase begins."""


class SilentProgress:
    """Shows nothing."""

    def advance(self, tensor: PlannedTensor) -> None:
        """Nothing to show."""

    def say(self, message: str) -> None:
        """Nothing to show."""


class SharedProgress:
    """For several threads: one reports at a time, and when one of them has failed the others end at their next report."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock, self._stopped = progress, Lock(), False

    def stop(self) -> None:
        """End the threads that report here."""
        self._stopped = True

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        with self._lock:
            if self._stopped:
                raise InterruptedError("another thread has ended the work")
            self._progress.advance(tensor)

    def say(self, message: str) -> None:
        """A new phase begins."""
        with self._lock:
            self._progress.say(message)


_QUIET = 30
"""Seconds after which something is said."""
NO_MORE: Mapping[str, float] = MappingProxyType({})


class Tally:
    """How much of a plan is done, by the work that its tensors are: an embedding has many bytes, but is soon averaged.

    `more` is work beyond the plan's own, by the tensors' names.
    """

    def __init__(self, plan: Plan, more: Mapping[str, float] = NO_MORE) -> None:
        self._more = more
        self.tensors, self.bytes = len(plan.tensors), plan.input_bytes
        self.work = max(1.0, sum(map(self._work, plan.tensors)))
        self.done_tensors, self.done_bytes, self.done_work = 0, 0, 0.0

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        self.done_tensors += 1
        self.done_bytes += input_bytes(tensor)
        self.done_work += self._work(tensor)

    @property
    def share(self) -> float:
        """Of the work, between 0 and 1."""
        return min(1.0, self.done_work / self.work)

    def _work(self, tensor: PlannedTensor) -> float:
        return work(tensor) + self._more.get(tensor.name, 0.0)


class PlainProgress:
    """A line for every tenth of the work, but not more than one a second, nor less than one in half a minute."""

    def __init__(self, plan: Plan, more: Mapping[str, float] = NO_MORE) -> None:
        self._tally = Tally(plan, more)
        self._started = self._printed = time.monotonic()
        self._next_share = 0.1

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        self._tally.advance(tensor)
        share, now = self._tally.share, time.monotonic()
        quiet_for = now - self._printed
        all_done = self._tally.done_tensors == self._tally.tensors
        if (share >= self._next_share and quiet_for > 1) or quiet_for > _QUIET or all_done:
            self._next_share = (int(share * 10) + 1) / 10
            self._printed = now
            self._print_line(max(1e-6, now - self._started))

    def _print_line(self, elapsed: float) -> None:
        tally = self._tally
        left = elapsed * (1 - tally.share) / max(tally.share, 1e-9)
        print(
            f"{tally.done_tensors}/{tally.tensors} tensors, {human_bytes(tally.done_bytes)} of {human_bytes(tally.bytes)} read, "
            f"{human_bytes(tally.done_bytes / elapsed)}/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    def say(self, message: str) -> None:
        """On its own line. What comes before the first tensor does not count for the rate."""
        if not self._tally.done_tensors:
            self._started = self._printed = time.monotonic()
        print(printable(message), file=sys.stderr, flush=True)


class LiveProgress:
    """A bar with tensors, bytes, time left and the last tensor's name, which is cut to what room the terminal leaves."""

    def __init__(self, plan: Plan, more: Mapping[str, float] = NO_MORE) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        whole, cut = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._tally = Tally(plan, more)
        self.bar = Bar(
            TextColumn("{task.fields[count]} tensors", table_column=whole), BarColumn(bar_width=16),
            TextColumn("{task.fields[read]} read", table_column=whole), TimeRemainingColumn(table_column=whole),
            TextColumn("{task.description}", table_column=cut, markup=False), console=Console(stderr=True), expand=True,
        )  # fmt: skip
        self._task = self.bar.add_task("", total=self._tally.work, **self._fields())

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        self._tally.advance(tensor)
        self.bar.update(self._task, completed=self._tally.done_work, description=tensor.name, **self._fields())

    def _fields(self) -> dict[str, Any]:
        return {"count": f"{self._tally.done_tensors}/{self._tally.tensors}", "read": human_bytes(self._tally.done_bytes)}

    def say(self, message: str) -> None:
        """Above the bar."""
        self.bar.console.print(printable(message), highlight=False, markup=False, emoji=False)


def tell_steps(progress: Progress, phase: str, steps: Mapping[str, float]) -> Iterator[str]:
    """The steps of a phase before the first tensor is merged, each with its work: a line for every half a minute of it."""
    started = told = time.monotonic()
    whole, done = sum(steps.values()), 0.0
    for number, (step, work_of_it) in enumerate(steps.items()):
        now = time.monotonic()
        if now - told > _QUIET and done:
            told = now
            left = (now - started) * (whole - done) / done
            progress.say(f"{phase}: {number}/{len(steps)} tensors, about {left:.0f} s left of it")
        done += work_of_it
        yield step


@contextmanager
def show_progress(plan: Plan, *, quiet: bool, more: Mapping[str, float] = NO_MORE) -> Iterator[Progress]:
    """The right kind for where standard error goes. `more` is work beyond the plan's own, by the tensors' names."""
    if quiet:
        yield SilentProgress()
    elif sys.stderr.isatty():
        live = LiveProgress(plan, more)
        with live.bar:
            yield live
    else:
        yield PlainProgress(plan, more)
