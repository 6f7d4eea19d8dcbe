"""A process of its own, and how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread


@dataclass(frozen=True)
class Footprint:
    """Anonymous memory before and at its largest, in bytes; the time between the child's `ready` and `done`; its last words."""

    before: int
    peak: int
    seconds: float
    report: str


def anonymous_memory(pid: int) -> int:
    """RssAnon of a process, in bytes: inputs are memory-mapped, and their pages belong to the page cache."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Run:
    """What a command took from its start to its end, with its children: seconds, CPU seconds, and anonymous memory in bytes."""

    seconds: float
    cpu_seconds: float
    peak: int


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [pid, *(member for child in children for member in _family(int(child)))]


def _family_memory(pid: int) -> int:
    total = 0
    for member in _family(pid):
        try:
            total += anonymous_memory(member)
        except OSError:
            continue  # it has just ended
    return total


def run_command(command: Sequence[str | Path], environment: Mapping[str, str] | None = None, log: Path | None = None) -> Run:
    """Run a command to its end, sampling its memory; an error with the end of what it said if it fails."""
    log = log or Path(os.devnull)
    peak, before, started = 0, os.times(), time.perf_counter()
    with log.open("w") as output:
        child = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output, env=environment)
        while child.poll() is None:
            try:
                peak = max(peak, _family_memory(child.pid))
            except OSError:  # the process ended while it was looked at
                break
            time.sleep(0.01)
        code = child.wait()
    seconds, after = time.perf_counter() - started, os.times()
    if code:
        raise SystemExit(f"{command[0]} ended with {code}:\n{log.read_text()[-2000:]}")
    print(f"{seconds:8.1f} s  {peak / 1e6:8.0f} MB  {' '.join(map(str, command))[:90]}", file=sys.stderr, flush=True)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(seconds, cpu, peak)


def watch(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Footprint:
    """Run Python code that prints `ready`, waits for a line, works, and prints `done` and a report, sampling its memory."""
    peak, stop = 0, Event()
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def sample() -> None:
            nonlocal peak
            while not stop.wait(0.003):
                peak = max(peak, anonymous_memory(child.pid))

        assert child.stdout.readline() == "ready\n", "the child did not start"
        before = anonymous_memory(child.pid)
        sampler = Thread(target=sample)
        sampler.start()
        started = time.perf_counter()
        child.stdin.write("\n")
        child.stdin.flush()
        done, _, report = child.stdout.readline().partition(" ")
        seconds = time.perf_counter() - started
        stop.set()
        sampler.join()
        assert done.strip() == "done", "the child failed"
        child.stdin.write("\n")
    return Footprint(before, peak, seconds, report)
