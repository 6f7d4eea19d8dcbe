"""Kill merges at many points and see what is left. Run as a program: it imports torch once and forks a process per merge.

A merge is killed either at one of its file-system operations (each can be chosen, so that no window is too small to be hit), or
at a moment. Afterwards the output must be absent or whole; the same command again must end with the bytes of a merge
that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acemerge
from acemerge.output import publishing
from child import command, fork, wait
from small_models import Models, write_models

_NOWHERE = os.open(os.devnull, os.O_WRONLY)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.truncate", "shutil.rmtree"}


@dataclass(frozen=True)
class Scene:
    """One folder with models, the merge that is killed, and what an undisturbed one gives."""

    folder: Path
    models: Models
    overwrite: bool

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def merge(self, output: Path, method: str = "emr", *, overwrite: bool = False) -> None:
        # emr writes shared/ and tasks/ besides, and makes a statistics pass.
        acemerge.merge(self.models.base, self.models.experts, output, method=method, shard_size="1kB", overwrite=overwrite)

    def disturbed(self) -> None:
        """The command line, whose exit codes are documented."""
        flags = ["-m", "emr", "--shard-size", "1kB", "-q", *(["--overwrite"] if self.overwrite else [])]
        command("merge", *self.models.arguments, "-o", self.output, *flags)

    def prepare(self) -> None:
        for path in self.folder.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.overwrite:
            shutil.copytree(self.folder / "earlier", self.output)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(work: Callable[[], object]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[1:])  # a signal in the middle of forking would be Python's to handle

    def unblocked() -> None:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(130))  # until the command line sets its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
        work()

    pid = fork(unblocked, _NOWHERE, _NOWHERE)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
    return pid


def watch_operations(action: Callable[[int], object]) -> None:
    """Call `action` with a running number before every file-system operation of this process."""
    count = 0

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in WATCHED:
            count += 1
            action(count)

    sys.addaudithook(hook)


def count_operations(scene: Scene) -> int:
    """How many there are in an undisturbed merge."""
    reader, writer = os.pipe()

    def work() -> None:
        watch_operations(lambda _: os.write(writer, b"."))
        scene.disturbed()

    scene.prepare()
    pid = start(work)
    os.close(writer)
    count = 0
    while block := os.read(reader, 65536):
        count += len(block)
    os.close(reader)
    assert wait(pid) == 0
    return count


def kill_at_operation(scene: Scene, number: int, with_signal: signal.Signals) -> int:
    def work() -> None:
        watch_operations(lambda count: os.kill(os.getpid(), with_signal) if count == number else None)
        scene.disturbed()

    return wait(start(work))


def kill_at_moment(scene: Scene, seconds: float, with_signal: signal.Signals) -> int:
    pid = start(scene.disturbed)
    time.sleep(seconds)
    os.kill(pid, with_signal)
    return wait(pid)


def check(scene: Scene, whole: dict[str, bytes], earlier: dict[str, bytes], what: str, code: int) -> None:
    """The output is absent or whole, and the same merge again ends with the right bytes."""
    assert code in (0, 130, -signal.SIGKILL, -signal.SIGTERM), (what, code)
    if scene.output.exists():
        found = tree(scene.output)
        assert found == whole or (scene.overwrite and found == earlier), (what, "half-made", sorted(found))
    if not scene.output.exists() or tree(scene.output) != whole:
        again = wait(start(scene.disturbed))
        assert again == 0, (what, "does not go on", again)
        assert [path.name for path in scene.folder.glob("out*")] == ["out"], (what, "litter")
    assert tree(scene.output) == whole, (what, "other bytes")


def run(folder: Path, trials: int, seed: int, *, overwrite: bool) -> dict[str, int]:
    """Kill `trials` merges, half of them at operations, half at moments; how many ended how."""
    scene = Scene(folder, write_models(folder), overwrite)
    scene.merge(folder / "earlier", "average")
    scene.merge(folder / "whole")
    whole, earlier = tree(folder / "whole"), tree(folder / "earlier")
    operations = count_operations(scene)
    scene.prepare()
    started = time.monotonic()
    assert wait(start(scene.disturbed)) == 0
    duration = time.monotonic() - started
    choose = random.Random(seed)
    ends: dict[str, int] = {}
    for trial in range(trials):
        scene.prepare()
        with_signal = SIGNALS[trial % len(SIGNALS)]
        if trial % 2:
            moment = choose.uniform(0, 1.1 * duration)
            what, code = f"{with_signal.name} after {moment:.4f} s", kill_at_moment(scene, moment, with_signal)
        else:
            number = choose.randint(1, operations)
            what, code = f"{with_signal.name} at operation {number}", kill_at_operation(scene, number, with_signal)
        left = "finished" if code == 0 else "shards left" if list(scene.folder.glob("out.partial/model*")) else "nothing left"
        ends[left] = ends.get(left, 0) + 1
        check(scene, whole, earlier, what, code)
    return {"operations": operations, **ends}


def every_operation(folder: Path, *, overwrite: bool) -> int:
    """Kill a merge at every single operation; how many there were."""
    scene = Scene(folder, write_models(folder), overwrite)
    scene.merge(folder / "earlier", "average")
    scene.merge(folder / "whole")
    whole, earlier = tree(folder / "whole"), tree(folder / "earlier")
    operations = count_operations(scene)
    for number in range(1, operations + 1):
        scene.prepare()
        with_signal = SIGNALS[number % len(SIGNALS)]
        code = kill_at_operation(scene, number, with_signal)
        check(scene, whole, earlier, f"{with_signal.name} at operation {number}", code)
    return operations


def run_from_command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier output")
    parser.add_argument("--every", action="store_true", help="every operation, one after the other")
    parser.add_argument("--no-exchange", action="store_true", help="as on a file system that cannot exchange two folders")
    given = parser.parse_args()
    if given.no_exchange:
        publishing.exchange = lambda one, other: False
    if given.every:
        print(f"killed at each of {every_operation(given.folder, overwrite=given.overwrite)} operations")
    else:
        print(run(given.folder, given.trials, given.seed, overwrite=given.overwrite))


if __name__ == "__main__":
    run_from_command_line()
