"""Fuzzing guided by coverage: every target of `fuzz_targets` for a while, from the corpus in `tests/corpus`, by atheris.

    python tests/support/fuzz.py --seconds 1200 [--only TARGET ...] [--keep]

Bytes of plain files are changed by libFuzzer, the trees of JSON inputs here: a value replaced, left out, doubled, or exchanged
with another. Whatever a target lets through that is none of acemerge's own errors, takes longer than a few seconds or more memory
than a merge of such files could need is written to --findings, and the run goes on. `--keep` packs what reached new code into the
corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[1] / "corpus"
MOST_SECONDS = 5.0
"""Of one input, by the processor's clock."""
MOST_MEMORY = 300_000_000
"""That one input may add to the process, in bytes."""
_LONGEST = 30_000
_SMALL_CORPUS = 30_000
"""Bytes of one target's corpus in the repository, compressed."""


# --- the corpus --------------------------------------------------------------------------------------------------------


def read_corpus(name: str) -> list[bytes]:
    """What is kept of a target."""
    path = CORPUS / f"{name}.zip"
    if not path.is_file():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(entry) for entry in sorted(archive.namelist())]


def write_corpus(name: str, inputs: list[bytes]) -> None:
    """The same, in the same bytes every time."""
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for content in sorted(set(inputs), key=lambda one: (len(one), one)):
            entry = zipfile.ZipInfo(hashlib.sha256(content).hexdigest()[:16])
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


# --- one input ---------------------------------------------------------------------------------------------------------


def peak_memory() -> int:
    """Of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TooLong(BaseException):
    """Not an exception, so that nobody takes it for a damaged file's."""


def _end_it(_signal: int, _frame: object) -> None:
    raise TooLong(f"took more than {MOST_SECONDS} s")


class Bounded:
    """Runs a target's work on one input, and asserts how long it took and how much memory it needed."""

    def __init__(self, work: Callable[[bytes], object]) -> None:
        self._work = work
        signal.signal(signal.SIGVTALRM, _end_it)

    def __call__(self, content: bytes) -> None:
        from fuzz_targets import survives

        before = peak_memory()
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        try:
            survives(lambda: self._work(content))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        memory = peak_memory() - before
        assert memory <= MOST_MEMORY, f"took {memory / 1e6:.0f} MB"


# --- changing trees ----------------------------------------------------------------------------------------------------

_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 64, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "..", "../x", "/etc/passwd", "\x1b[2J", "<script>", "\ud800", "base", "F32", "I64", "BOOL", "F8_E4M3", "float32",
    [], {}, [[]], [0],
    [1, 1], [0, 4], {"": None}, "a" * 1000, "(a+)+$", "*", "{first: 0, last: 1}",
]  # fmt: skip


def _places(tree: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (list or mapping, key) of a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        found.append((tree, key))
        _places(value, found)
    return found


def change_tree(tree: Any, chooser: random.Random) -> Any:
    """A tree with one thing different."""
    places = _places(tree, [])
    if not places:
        return chooser.choice(_ODD)
    holder, key = chooser.choice(places)
    kind = chooser.choice(["replace", "replace", "remove", "exchange", "exchange", "rename", "number", "wrap", "text"])
    value = holder[key]
    if kind == "replace":
        holder[key] = chooser.choice(_ODD)
    elif kind == "remove":
        del holder[key]
    elif kind == "exchange":
        other, at = chooser.choice(places)
        holder[key] = json.loads(json.dumps(other[at]))
    elif kind == "rename" and isinstance(holder, dict):
        names = [name for one, name in places if isinstance(one, dict)]
        name = chooser.choice([*names, "", "x", "__metadata__", "..", key + chooser.choice("x.:/")])
        holder[name] = holder.pop(key)
    elif kind == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = value + chooser.choice([1, -1, 0.5, 4, -value, value])
    elif kind == "wrap":
        holder[key] = chooser.choice([[value], {"x": value}, [value, value], str(value)])
    elif isinstance(value, str):
        at = chooser.randrange(len(value) + 1)
        holder[key] = (
            value[:at] + chooser.choice([".", "x", "\n", "0", "/", "\u200b", ":"]) + value[at + chooser.choice([0, 1, 4]) :]
        )
    return tree


def change_json(content: bytes, most: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """A JSON input with something different; one that is none, or now and then, as bytes."""
    chooser = random.Random(seed)
    if chooser.random() < 0.05:
        return plain(content, most)
    try:
        tree = json.loads(content)
        for _ in range(chooser.choice([1, 1, 1, 2, 4])):
            tree = change_tree(tree, chooser)
        changed = json.dumps(tree).encode()
    except (ValueError, TypeError, OverflowError, RecursionError):  # no JSON, or a change that makes none
        return plain(content, most)
    return changed if len(changed) <= most else content


# --- one target, in a process of its own --------------------------------------------------------------------------------


def fuzz_one(name: str, folder: Path, seconds: int) -> None:
    """Until the time is over; what libFuzzer says goes to standard error."""
    atheris: Any = importlib.import_module("atheris")
    importlib.import_module("torch")  # before: libraries are not followed, only acemerge
    with atheris.instrument_imports(include=["acemerge"]):
        from fuzz_targets import TARGETS

        chosen = TARGETS[name]
        scratch = folder / "scratch"
        scratch.mkdir()
        run = Bounded(chosen.prepare(scratch))
        for number, seed in enumerate([*chosen.seeds(), *read_corpus(name)]):
            (folder / "corpus" / f"seed-{number}").write_bytes(seed)
            run(seed)  # also imports what is imported late
    findings = folder / "findings"

    def test_one_input(content: bytes) -> None:
        try:
            run(content)
        except (Exception, TooLong) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}"
            if not (findings / told).exists():
                (findings / told).write_bytes(content)
                (findings / f"{told}.txt").write_text(traceback.format_exc())

    options = [
        f"-max_total_time={seconds}", f"-max_len={_LONGEST}", "-timeout=100000", "-rss_limit_mb=4000", "-len_control=0",
        f"-artifact_prefix={findings}/", "-print_final_stats=1", "-reload=0", "-detect_leaks=0", str(folder / "corpus"),
    ]  # fmt: skip
    changes = (
        {"custom_mutator": lambda c, most, seed: change_json(c, most, seed, atheris.Mutate)} if chosen.shape == "json" else {}
    )
    atheris.Setup([sys.argv[0], *options], test_one_input, **changes)
    atheris.Fuzz()


# --- all of them -------------------------------------------------------------------------------------------------------


def fuzz(name: str, seconds: int, findings: Path, keep: bool) -> tuple[int, str]:
    """One target in a process of its own: how many inputs it had, and a line about it."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        folder = Path(temporary)
        for part in ("corpus", "findings"):
            (folder / part).mkdir()
        command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--seconds", str(seconds)]
        ended = subprocess.run(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace", check=False
        )
        counts = re.findall(r"#(\d+)\s.*?cov: (\d+) ft: (\d+)", ended.stderr)
        first = re.search(r"INITED\s+cov: (\d+)", ended.stderr)
        executions = int(counts[-1][0]) if counts else 0
        found = [path for path in (folder / "findings").iterdir() if path.suffix != ".txt"]
        for path in (folder / "findings").iterdir():
            findings.mkdir(parents=True, exist_ok=True)
            (findings / f"{name}--{path.name}").write_bytes(path.read_bytes())
        if ended.returncode:
            findings.mkdir(parents=True, exist_ok=True)
            (findings / f"{name}--ended.txt").write_text(ended.stderr[-20_000:])
        if keep:
            keep_what_is_new(name, folder / "corpus")
    covered = f"{first[1] if first else '?'} -> {counts[-1][1] if counts else '?'}"
    ended_badly = f", ended with code {ended.returncode}" if ended.returncode else ""
    return executions, f"| {name} | {executions:,} | {covered} | {len(found)}{ended_badly} |"


def keep_what_is_new(name: str, folder: Path) -> None:
    """The smallest inputs that were kept for the code that they reach, as far as a small corpus has room."""
    chosen: list[bytes] = []
    room = _SMALL_CORPUS
    known = read_corpus(name)
    import zlib

    for content in [*known, *sorted((path.read_bytes() for path in folder.iterdir()), key=len)]:
        cost = len(zlib.compress(content, 9)) + 120
        if content not in chosen and cost <= room:
            chosen.append(content)
            room -= cost
    write_corpus(name, chosen)


def all_targets() -> list[str]:
    """Their names."""
    from fuzz_targets import TARGETS

    return list(TARGETS)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=1200, help="for all targets together")
    parser.add_argument("--only", nargs="*", help="these targets")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs that failed are written")
    parser.add_argument("--keep", action="store_true", help="add what reaches new code to the corpus")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        fuzz_one(given.child, given.folder, given.seconds)
        return
    names = given.only or all_targets()
    total, failed = 0, False
    print("| target | inputs | branches covered | findings |\n|---|---:|---:|---:|", flush=True)
    for name in names:
        executions, line = fuzz(name, max(1, given.seconds // len(names)), given.findings, given.keep)
        total += executions
        failed |= not line.endswith("| 0 |")
        print(line, flush=True)
    print(f"\n{total:,} inputs to {len(names)} targets")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
