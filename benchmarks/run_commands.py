"""Run a list of commands of acemerge in one process, which imports torch once: what `same_bytes.py` starts for each version.

    PYTHONPATH=VERSION/src python benchmarks/run_commands.py cases.json

Only what every version has is used: the command line. Outputs go below the current folder, failures into failures.json.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

KILLED = 99


def run_commands(cases: Path) -> None:
    """Run the commands that a file lists, below the current folder; their exit codes and complaints go to failures.json."""
    import acemerge

    assert Path(acemerge.__file__).is_relative_to(os.environ["PYTHONPATH"]), f"{acemerge.__file__} is another version"
    failures: dict[str, list[str]] = {}
    for case in json.loads(cases.read_text()):
        started = time.process_time()
        for command in case["commands"]:
            code, printed, complaint = _run(command)
            if command["printed"]:
                Path(command["printed"]).write_text(printed)
            if code != (KILLED if command["killed_at"] else 0):
                said = complaint.strip().splitlines()[-1:] or ["nothing was said"]
                failures.setdefault(case["name"], []).append(f"exit code {code} of {_short(command['arguments'])}: {said[0]}")
        print(f"{time.process_time() - started:6.1f} s of the processor: {case['name']}", file=sys.stderr, flush=True)
    Path("failures.json").write_text(json.dumps(failures))


def _run(command: dict[str, Any]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    if command["killed_at"]:
        return _run_killed(command), "", "it ended before it opened a file of that name"
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = _main(command["arguments"])
    return code, out.getvalue(), err.getvalue()


def _main(arguments: Sequence[str]) -> int:
    from acemerge.cli import main

    sys.argv = ["acemerge", *arguments]
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except Exception:  # what the command line should have explained is a failure like others
        traceback.print_exc()
        return 70
    return 0


def _run_killed(command: dict[str, Any]) -> int:
    """In a fork that dies, as if killed, when it opens a file of that name."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and fnmatch(Path(os.fsdecode(arguments[0])).name, command["killed_at"]):
            os._exit(KILLED)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads may exist, but none of them holds a lock we need
        child = os.fork()
    if child == 0:
        sys.addaudithook(watch)
        os._exit(_main(command["arguments"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _short(arguments: Sequence[str]) -> str:
    return " ".join(Path(argument).name if argument.startswith("/") else argument for argument in arguments)


if __name__ == "__main__":
    run_commands(Path(sys.argv[1]))
