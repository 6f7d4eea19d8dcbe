"""Faults under the C library: file_faults.c is compiled, and loaded before Python by running the program anew."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class _Orders(ctypes.Structure):
    """`struct orders` of the C file, in memory that forked processes share."""

    _fields_ = (
        ("folder", ctypes.c_char * 4096),
        ("at", ctypes.c_long),
        ("signal", ctypes.c_int),
        ("error", ctypes.c_int),
        ("for_good", ctypes.c_int),
        ("changes_only", ctypes.c_int),
        ("count", ctypes.c_long),
    )


_ORDERS = _Orders.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Orders)))


@dataclass(frozen=True)
class Fault:
    """What happens at one operation on files; without a number, operations are only counted."""

    at: int = 0
    signal: int = 0
    for_good: bool = False
    changes_only: bool = False
    """Whether reads are no operations: a process that is killed before one leaves what it left before."""

    def __str__(self) -> str:
        from signal import Signals

        what = Signals(self.signal).name if self.signal else "EIO"
        return f"{what} {'from' if self.for_good else 'at'} operation {self.at}"

    def arm(self, folder: Path) -> None:
        """For this process, from now on, and files below this folder."""
        _ORDERS.folder = os.fsencode(folder)
        _ORDERS.at, _ORDERS.signal, _ORDERS.error = self.at, self.signal, errno.EIO
        _ORDERS.for_good, _ORDERS.changes_only, _ORDERS.count = self.for_good, self.changes_only, 0
        ctypes.CDLL(None).obey(ctypes.byref(_ORDERS))


def counted() -> int:
    """Operations of the process that was armed last."""
    return int(_ORDERS.count)


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc") if sys.platform == "linux" else None


def run_with_faults() -> None:
    """Start this program again with the library under it, if it is not there yet."""
    if hasattr(ctypes.CDLL(None), "obey"):
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "file_faults.so"
        found = compiler()
        assert found, "no C compiler"
        subprocess.run([found, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
        ended = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(library)}, check=False)
    sys.exit(ended.returncode)
