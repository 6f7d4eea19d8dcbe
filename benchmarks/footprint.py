"""A process of its own, and how much memory it takes."""

from __future__ import annotations

import subprocess
import sys
import time
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


def watch(code: str, *arguments: str) -> Footprint:
    """Run Python code that prints `ready`, waits for a line, works, and prints `done` and a report, sampling its memory."""
    peak, stop = 0, Event()
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
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
