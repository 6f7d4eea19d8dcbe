"""The command line in a forked process: a process of its own without importing torch again, which takes longer than the merge."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import acemerge.execute.pipeline  # noqa: F401  (before the fork, and before a child gives up its rights)
from acemerge.cli.app import main

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
CANNOT_MOUNT = 77
CANNOT_FLUSH = 120


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (negative: the signal), and what it wrote."""

    code: int
    out: str
    err: str


def fork(work: Callable[[], object], out: int, err: int) -> int:
    """Do some work in a child that writes to these descriptors; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads may exist, but none of them holds a lock we need
        pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # what others left over is not ours to destroy: some of it (Ray's) waits for threads that a fork does not copy
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_flushed() or code)


def _flushed() -> int:
    """What Python does at its end: 0, or the exit code that it has for a standard output that takes no more."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return CANNOT_FLUSH
    return 0


def wait(pid: int) -> int:
    """A child's exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object]) -> Ended:
    """Do some work in a child, to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = wait(fork(work, out.fileno(), err.fileno()))
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())


def command(*arguments: object) -> None:
    """`acemerge ...` in this process."""
    sys.argv = ["acemerge", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise


def with_own_mounts(*mounts: list[str]) -> None:
    """Give this process mounts that nobody else sees, or exit with CANNOT_MOUNT."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(_NEW_USER | _NEW_MOUNTS):
        os._exit(CANNOT_MOUNT)
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(content)
    for arguments in mounts:
        if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
            os._exit(CANNOT_MOUNT)
