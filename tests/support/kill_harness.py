"""Disturb every verb in every way, and see what is left. Run as a program: it imports torch once and forks a process per trial.

A verb is killed at each of its operations that change files; its operations on files fail (EIO); its disk is too small or
read-only; its standard output takes nothing. Afterwards
- each output is absent, as it was before, or whole, and nothing of the user's is touched;
- the exit code is a documented one, and standard error has one sentence, which does not say that nothing was published if it was;
- the same command again ends with the bytes of one that nobody disturbed, and leaves nothing else behind.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import typer.main

import acemerge
from acemerge.cli.app import app
from acemerge.methods import all_methods
from acemerge.output.manifest import MANIFEST
from child import Ended, fork, with_own_mounts
from file_faults import Fault, counted, run_with_faults
from small_models import tree
from verbs import CACHE, CARELESS, VERBS, Verb

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLED = (0, 3, 130, -signal.SIGKILL, -signal.SIGTERM)
FAILED = (0, 1, 2, 3)
SECONDS = 600
PAGE = 4096
MINE = "mine.txt"
"""A file of the user's beside the outputs."""

Tree = dict[str, bytes]


class BrokenPromiseError(AssertionError):
    """A promise that was not kept."""


def is_working_name(path: str) -> bool:
    """Of something that is on its way, or out of it."""
    return any(
        part.endswith((".partial", ".acemerge-partial", ".lock", ".replaced")) or part.startswith(".") for part in path.split("/")
    )


@dataclass
class Scene:
    """A folder in which a verb is run again and again, and what an undisturbed run makes of it."""

    folder: Path
    verb: Verb
    given: Tree = field(default_factory=dict)
    before: Tree = field(default_factory=dict)
    whole: Tree = field(default_factory=dict)
    gone_on: set[bytes] = field(default_factory=set)
    """What was left so before, and from where the next run ended well: not tried twice."""

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def prepare(self) -> None:
        """In processes of their own: one that has computed must not fork."""
        for name in ("given", "out"):
            (self.folder / name).mkdir(parents=True)
        prepared = run_child(lambda: self.verb.prepare(self.folder))
        assert prepared.code == 0, prepared.err
        (self.out / MINE).write_text("mine")
        shutil.copytree(self.out, self.folder / "before")
        self.given, self.before = tree(self.folder / "given"), self.outputs()
        first = self.run_and_import()
        assert first.code in (0, 3), first.err
        self.code, self.whole = first.code, self.outputs()
        for again in (self.run, self.run_anew):
            self.restore()
            left = self.left()
            assert again().code == self.code, "an undisturbed run ended otherwise"
            assert self.outputs() == self.whole, f"an undisturbed run gave other bytes: {self.differences(self.outputs())}"
            self.gone_on.add(left)

    def run_and_import(self) -> Ended:
        """Undisturbed; what it imports on the way is imported here too, so that the other runs need not."""
        listed = self.folder / "modules"

        def note() -> None:
            try:
                os.chdir(self.folder)
                self.verb.run()
            finally:
                listed.write_text("\n".join(sys.modules))

        ended = run_child(note)
        for name in listed.read_text().splitlines():
            with suppress(ImportError):
                importlib.import_module(name)
        return ended

    def run_anew(self) -> Ended:
        """The verb in a process that is no fork of this one: it must do the same."""
        command = [sys.executable, __file__, "--anew", self.verb.name]
        ended = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=SECONDS)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def left(self) -> bytes:
        """All that is in `out`, what is on its way too."""
        return hashlib.sha256(repr(sorted(tree(self.out).items())).encode()).digest()

    def outputs(self) -> Tree:
        return {name: content for name, content in tree(self.out).items() if not name.startswith(f"{CACHE}/")}

    def restore(self) -> None:
        for path in self.out.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.folder / "before", self.out, dirs_exist_ok=True)

    def run(self, fault: Fault | None = None, streams: Callable[[], None] | None = None, more: Sequence[str] = ()) -> Ended:
        """The verb in a process of its own."""

        def work() -> None:
            os.chdir(self.folder)
            if streams:
                streams()
            if fault:
                fault.arm(self.folder)
            self.verb.run(*more)

        return run_child(work)

    # -- what is left

    def check(self, ended: Ended, codes: Sequence[int]) -> None:
        """After a run that was disturbed."""
        if ended.code not in codes:
            raise BrokenPromiseError(f"exit code {ended.code}")
        self.check_words(ended)
        if tree(self.folder / "given") != self.given:
            raise BrokenPromiseError("an input was changed")
        found = {name: content for name, content in self.outputs().items() if not is_working_name(name)}
        self.check_parts(found)
        if "othing was published" in ended.err and not self.only_journals_differ(found):
            raise BrokenPromiseError("says that nothing was published")
        made = {name: content for name, content in self.outputs().items() if content or not name.endswith(".lock")}
        if ended.code in (0, 3) and made != self.whole:  # a lock that could not be removed is empty, and the next run's
            raise BrokenPromiseError(f"success, but {self.differences(made)}")

    def check_words(self, ended: Ended) -> None:
        """One sentence, of a failure only."""
        said = [line for line in ended.err.splitlines() if line.startswith(("acemerge: error:", "acemerge: interrupted"))]
        wanted = 0 if ended.code in (0, 3) or ended.code < 0 else 1
        if len(said) != wanted and not (ended.code < 0 and len(said) == 1):
            raise BrokenPromiseError(f"{len(said)} sentences")
        if "Traceback" in ended.err or "Exception ignored" in ended.err or "This is a bug" in ended.err:
            raise BrokenPromiseError("a traceback, or a bug")

    def check_parts(self, found: Tree) -> None:
        """Every folder with a manifest, and every other file, is absent, as before, or whole."""
        folders, known = folders_of_outputs(found), {*folders_of_outputs(self.whole), *folders_of_outputs(self.before)}
        for folder in folders | known:
            inside = below(found, folder)
            if not inside or inside in (below(self.whole, folder), below(self.before, folder)):
                continue
            if folder in known or acemerge.verify(self.out / folder).problems:  # others are models that only had to be scored
                raise BrokenPromiseError(f"{folder} is half-made: {sorted(inside)}")
        for name, content in found.items():
            in_folder = any(name.startswith(f"{folder}/") for folder in folders)
            if name in self.verb.journals:
                json.loads(content)
            elif not in_folder and content not in (self.whole.get(name), self.before.get(name)):
                raise BrokenPromiseError(f"{name} is neither old nor new, {len(content)} bytes")
        gone = [name for name in self.before if name in self.whole and name not in found]
        if gone and not self.replaced(gone):
            raise BrokenPromiseError(f"{gone[0]} is gone")

    def replaced(self, gone: Sequence[str]) -> bool:
        """Where folders cannot be exchanged, the earlier one lies beside for a moment."""
        return self.verb.name.endswith("no exchange") and (self.out / "merged.replaced").is_dir() and MINE not in gone

    def only_journals_differ(self, found: Tree) -> bool:
        return {n: c for n, c in found.items() if n not in self.verb.journals} == self.before

    def differences(self, found: Tree) -> str:
        names = sorted(name for name in {*found, *self.whole} if found.get(name) != self.whole.get(name))
        return f"{names} are not as they should be"

    def check_again(self) -> None:
        """The same command goes on, and ends with the right bytes."""
        if self.outputs() == self.whole and self.whole != self.before:
            return  # most verbs refuse an output that is there
        if (left := self.left()) in self.gone_on:
            return
        published = {name: content for name, content in self.outputs().items() if not is_working_name(name)}
        finished = published == self.whole != self.before
        again = self.run()
        if finished and again.code == 2:
            return
        if again.code != self.code:
            raise BrokenPromiseError(f"does not go on: {again.code} {again.err}")
        if self.outputs() != self.whole:
            raise BrokenPromiseError(f"when it went on, {self.differences(self.outputs())}")
        litter = [name for name in tree(self.out) if name.startswith(f"{CACHE}/") and is_working_name(name)]
        if litter:
            raise BrokenPromiseError(f"when it had gone on, {litter} were left")
        self.gone_on.add(left)


def folders_of_outputs(files: Tree) -> set[str]:
    return {str(Path(name).parent) for name in files if Path(name).name == MANIFEST}


def below(files: Tree, folder: str) -> Tree:
    return {name: content for name, content in files.items() if name.startswith(f"{folder}/")}


# --- a process for each trial ------------------------------------------------------------------------------------------


def run_child(work: Callable[[], object], seconds: float = SECONDS) -> Ended:
    """Do some work in a child that must end in time."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = start(work, out.fileno(), err.fileno())
        code = wait_at_most(pid, seconds)
        out.seek(0)
        err.seek(0)
        ended = Ended(code, out.read(), err.read())
    return ended


def start(work: Callable[[], object], out: int, err: int) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[1:])  # a signal in the middle of forking would be Python's to handle

    def unblocked() -> None:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(130))  # until the command line sets its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
        work()

    pid = fork(unblocked, out, err)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
    return pid


def wait_at_most(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise BrokenPromiseError(f"still running after {seconds} s")
        time.sleep(0.002)


# --- the ways of disturbing --------------------------------------------------------------------------------------------


@dataclass
class Account:
    """What was tried on one verb, and what broke."""

    verb: Verb
    tried: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    @contextmanager
    def trial(self, way: str, what: object) -> Iterator[list[Ended]]:
        self.tried[way] += 1
        ended: list[Ended] = []
        try:
            yield ended
        except (BrokenPromiseError, AssertionError, json.JSONDecodeError) as error:
            said = ended[0].err.strip().splitlines()[-1:] if ended else []
            self.broken.append(f"{self.verb.name}, {what}: {error} {said}")
            print(f"BROKEN {self.broken[-1]}", flush=True)


def operations(scene: Scene, *, changes_only: bool) -> int:
    """How many there are in an undisturbed run."""
    scene.restore()
    assert scene.run(Fault(changes_only=changes_only)).code == scene.code
    return counted()


def chosen(numbers: int, most: int | None, seed: int) -> list[int]:
    every = range(1, numbers + 1)
    return sorted(random.Random(seed).sample(every, most)) if most is not None and most < numbers else list(every)


def kill(scene: Scene, account: Account, most: int | None, seed: int) -> None:
    """At its operations that change something."""
    total = operations(scene, changes_only=True)
    account.tried["operations"] = total
    for trial, number in enumerate(chosen(total, most, seed)):
        fault = Fault(number, signal=SIGNALS[trial % len(SIGNALS)], changes_only=True)
        disturb(scene, account, "killed", fault, KILLED)


def fail(scene: Scene, account: Account, most: int | None, seed: int) -> None:
    """EIO at its operations, reads too: once, or from there on."""
    total = operations(scene, changes_only=False)
    account.tried["operations and reads"] = total
    for trial, number in enumerate(chosen(total, most, seed)):
        disturb(scene, account, "EIO", Fault(number, for_good=trial % 2 == 1), FAILED)


def disturb(scene: Scene, account: Account, way: str, fault: Fault, codes: Sequence[int]) -> None:
    scene.restore()
    with account.trial(way, fault) as ended:
        ended.append(scene.run(fault))
        scene.check(ended[0], codes)
        scene.check_again()


def small_disks(scene: Scene, account: Account, most: int | None, seed: int) -> None:
    """Of sizes at which it fails, page by page; then the disk grows, and it goes on."""
    if scene.whole == scene.before:
        return
    too_small, enough = 0, 1
    while not fits(scene, enough):
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if fits(scene, middle) else (middle, enough)
    for size in chosen(too_small, most, seed):
        on_a_disk(scene, account, "full disk", f"full disk of {size} pages", size)


def fits(scene: Scene, pages: int) -> bool:
    """Whether it succeeds on a disk with so much room."""

    def there() -> None:
        make_disk(scene, pages)
        sys.exit(scene.run(more=scene.verb.makes_room).code not in (0, 3))

    return run_child(there, 2 * SECONDS).code == 0


def read_only(scene: Scene, account: Account, most: int | None, seed: int) -> None:
    if scene.whole != scene.before:
        on_a_disk(scene, account, "read-only", "read-only disk", None)


def on_a_disk(scene: Scene, account: Account, way: str, what: str, pages: int | None) -> None:
    """`out` is a disk of its own: with so many free pages, or read-only."""

    def there() -> None:
        make_disk(scene, pages)
        own = Account(scene.verb)
        with own.trial(way, what) as ended:
            ended.append(scene.run(more=scene.verb.makes_room))
            scene.check(ended[0], (1, 2))
            remount(scene, "rw,size=100M")
            scene.check_again()
        if own.broken:
            sys.exit(1)

    scene.restore()
    ended = run_child(there, 3 * SECONDS)
    account.tried[way] += 1
    if ended.code:
        account.broken.append(ended.out + ended.err)
        print(account.broken[-1], flush=True)


def make_disk(scene: Scene, pages: int | None) -> None:
    """For this process and its children alone, with what was there before."""
    with_own_mounts(["-t", "tmpfs", "-o", "size=100M", "tmpfs", str(scene.out)])
    scene.restore()
    used = sum(-(-path.stat().st_size // PAGE) for path in scene.out.rglob("*") if path.is_file())
    remount(scene, "ro" if pages is None else f"size={(used + pages) * PAGE}")


def remount(scene: Scene, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(scene.out)], check=True)


def full_output() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def closed_pipe() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)


def closed_output() -> None:
    os.close(1)


def standard_output(scene: Scene, account: Account, most: int | None, seed: int) -> None:
    """Full, a pipe that nobody reads, or closed: what a verb prints is lost, what it writes is not."""
    for streams, codes in ((full_output, (0, 1)), (closed_pipe, (0, 3)), (closed_output, (0, 3))):
        scene.restore()
        with account.trial("standard output", streams.__name__) as ended:
            ended.append(scene.run(streams=streams))
            scene.check(ended[0], codes)
            scene.check_again()


WAYS = {"kill": kill, "eio": fail, "disk": small_disks, "read-only": read_only, "stdout": standard_output}


def run_from_command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verb", action="append", help="only this one; repeatable")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; repeatable")
    parser.add_argument("--most", type=int, help="trials of a way, chosen at random; by default all")
    parser.add_argument("--most-of-slow", type=int, help="the same, of verbs that take seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anew", help=argparse.SUPPRESS)
    given = parser.parse_args()
    broken = 0
    memory = Path("/dev/shm")
    named = {verb.name: verb for verb in (*VERBS, CARELESS)}
    if given.anew:
        named[given.anew].run()
        return
    for verb in [named[name] for name in given.verb] if given.verb else VERBS:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            scene, account = Scene(Path(folder).resolve() / "scene", verb), Account(verb)
            scene.prepare()
            started = time.monotonic()
            for way in given.way or WAYS:
                most = given.most_of_slow if verb.slow and given.most_of_slow is not None else given.most
                WAYS[way](scene, account, most, given.seed)
            tried = ", ".join(f"{way} {count}" for way, count in account.tried.items())
            print(f"{verb.name}: {tried}; {len(account.broken)} broken; {time.monotonic() - started:.0f} s", flush=True)
            broken += len(account.broken)
    sys.exit(broken > 0)


if __name__ == "__main__":
    run_with_faults()
    typer.main.get_command = cache(typer.main.get_command)  # built of our type hints, which takes longer than most verbs
    typer.main.get_command(app)
    all_methods()
    gc.freeze()
    run_from_command_line()
