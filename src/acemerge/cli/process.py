"""How the command line's process ends when it cannot end by itself: one sentence on standard error and a documented exit code."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

INTERRUPTED = 130
INTERRUPTION = (
    "acemerge: interrupted, nothing half-made was published; repeat the command to go on: what a merge, a bench or an evaluation "
    "has finished is not done again\n"
)
GRACE_SECONDS = 2.0

_BUS_ERROR = (
    "acemerge: error: an input file shrank, or its disk failed, while it was being read; nothing was published. Repeat the "
    "command when the files are whole and nobody writes to them\n"
)


def _end_after_bus_error(_signal: int) -> None:
    os.write(2, _BUS_ERROR.encode())
    os._exit(1)


# The handler must outlive every call of it.
_BUS_ERROR_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end_after_bus_error)


def explain_bus_errors() -> None:
    """Say what happened when a memory-mapped file loses the page that is being read, instead of dying without a word.

    Python's own handlers run only after the instruction that failed, which never ends, so the C library calls this one itself.
    Torch reads pages without holding Python's lock, so the handler can take it.
    """
    ctypes.CDLL(None).signal(int(signal.SIGBUS), _BUS_ERROR_HANDLER)


def open_standard_streams() -> None:
    """Where a parent closed standard input, output or error, open the null device: else the next file would take its place."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


@contextmanager
def importing() -> Iterator[None]:
    """Python does not look for garbage among what is imported, now or later: torch makes a million objects, which all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Interruption:
    """Whether Ctrl-C was pressed. Libraries sometimes turn the exception that Python makes of it into another one."""

    def __init__(self) -> None:
        self.received = False
        self.ended = Event()

    def receive(self, _signal: int, _frame: object) -> None:
        """Note it, then do what Python does."""
        self.received = True
        raise KeyboardInterrupt


@contextmanager
def prompt_interruption() -> Iterator[Interruption]:
    """End soon after Ctrl-C even where Python is waiting for a long matrix decomposition, whose end it would wait for."""
    interruption = Interruption()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handler_before = signal.signal(signal.SIGINT, interruption.receive)
    Thread(target=_end_after_interruption, args=(reader, interruption.ended), daemon=True).start()
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, handler_before)
        signal.set_wakeup_fd(descriptor_before)
        interruption.ended.set()
        os.close(writer)


def _end_after_interruption(reader: int, ended: Event) -> None:
    while received := os.read(reader, 64):
        if signal.SIGINT in received and not ended.wait(GRACE_SECONDS):
            os.write(2, INTERRUPTION.encode())
            os._exit(INTERRUPTED)
    os.close(reader)
