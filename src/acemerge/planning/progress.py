"""Progress on long work: a live bar on a terminal, sparse plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from acemerge.planning.estimates import input_bytes
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


class PlainProgress:
    """A line for every tenth of the bytes, but not more than one a second, nor less than one in half a minute."""

    def __init__(self, plan: Plan) -> None:
        self._tensors, self._bytes = len(plan.tensors), max(1, plan.input_bytes)
        self._done_tensors = self._done_bytes = 0
        self._started = self._printed = time.monotonic()
        self._next_share = 0.1

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        self._done_tensors += 1
        self._done_bytes += input_bytes(tensor)
        share, now = self._done_bytes / self._bytes, time.monotonic()
        quiet_for = now - self._printed
        if (share >= self._next_share and quiet_for > 1) or quiet_for > 30 or self._done_tensors == self._tensors:
            self._next_share = (int(share * 10) + 1) / 10
            self._printed = now
            self._print_line(share, max(1e-6, now - self._started))

    def _print_line(self, share: float, elapsed: float) -> None:
        left = elapsed * (1 - share) / max(share, 1e-9)
        print(
            f"{self._done_tensors}/{self._tensors} tensors, {human_bytes(self._done_bytes)} of {human_bytes(self._bytes)} read, "
            f"{human_bytes(self._done_bytes / elapsed)}/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    def say(self, message: str) -> None:
        """On its own line. What comes before the first tensor does not count for the rate."""
        if not self._done_tensors:
            self._started = self._printed = time.monotonic()
        print(message, file=sys.stderr, flush=True)


class LiveProgress:
    """A bar with tensors, bytes, rate and time left."""

    def __init__(self, plan: Plan) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        self._tensors, self._done = len(plan.tensors), 0
        self.bar = Bar(
            TextColumn("{task.fields[count]} tensors"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), TextColumn("{task.description}"), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self.bar.add_task("", total=plan.input_bytes, count=f"0/{self._tensors}")

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        self._done += 1
        self.bar.update(self._task, advance=input_bytes(tensor), description=tensor.name, count=f"{self._done}/{self._tensors}")

    def say(self, message: str) -> None:
        """Above the bar."""
        self.bar.console.print(message, highlight=False, markup=False)


@contextmanager
def show_progress(plan: Plan, *, quiet: bool) -> Iterator[Progress]:
    """The right kind for where standard error goes."""
    if quiet:
        yield SilentProgress()
    elif sys.stderr.isatty():
        live = LiveProgress(plan)
        with live.bar:
            yield live
    else:
        yield PlainProgress(plan)
