"""The same inputs give the same bytes: a zoo of models merged by two versions of acemerge, every output file compared.

    python benchmarks/same_bytes.py BEFORE/src AFTER/src

Every family, adapters, differing heads, each method, precisions, shards, sweeps, resumed merges, Ray and pages: see `zoo.py`. The
models are made once; each version runs all commands through its own command line, in a process of its own and in a folder of its
own. Differences fail, unless they are named in `EXPECTED`. Takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from record import print_table

EXPECTED: dict[str, str] = {}
"""Differences that are meant: a pattern of CASE/FILE, and the reason."""


@dataclass(frozen=True)
class Version:
    """One version's sources, and the folder that it works in."""

    source: Path
    folder: Path

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """A Python process that has this version."""
        settings = {
            "PYTHONPATH": str(self.source),
            "ACEMERGE_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0" if self.folder.name == "before" else "1",  # bytes must not depend on it
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, env={**os.environ, **settings}, cwd=self.folder, stdout=subprocess.PIPE, text=True)

    @property
    def failures(self) -> dict[str, list[str]]:
        """By case."""
        found: dict[str, list[str]] = json.loads((self.folder / "failures.json").read_text())
        return found


def make_zoo(folder: Path, before: Version, only: str) -> Path:
    """The models, and a file with what to run: the methods are those that the version before has."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from zoo import Zoo, all_cases

    methods = json.loads(before.start("-m", "acemerge", "methods", "--json").communicate()[0])
    cases = folder / "cases.json"
    found = all_cases(Zoo(folder / "models"), methods)
    cases.write_text(json.dumps([{**asdict(case), "folder": case.folder} for case in found if fnmatch(case.name, only)]))
    return cases


def files_below(folder: Path) -> dict[str, Path]:
    """Relative name -> file."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def differences(one: Path, other: Path) -> Iterator[tuple[str, str]]:
    """Relative name of each file that differs, and how."""
    left, right = files_below(one), files_below(other)
    for name in sorted(left.keys() | right.keys()):
        if name not in right or name not in left:
            yield name, f"only in {one if name in left else other}"
        elif left[name].read_bytes() != right[name].read_bytes():
            yield name, _how(left[name], right[name])


def _how(one: Path, other: Path) -> str:
    """In a few words, for a reader who looks for the cause."""
    if one.suffix == ".safetensors":
        return _how_weights(one, other)
    try:
        lines = [path.read_text(encoding="utf-8").splitlines() for path in (one, other)]
    except UnicodeDecodeError:
        return f"{one.stat().st_size} and {other.stat().st_size} bytes"
    for number, (mine, theirs) in enumerate(zip(*lines, strict=False), 1):
        if mine != theirs:
            return f"line {number}: {mine.strip()[:80]!r}, {theirs.strip()[:80]!r}"
    return f"{len(lines[0])} and {len(lines[1])} lines"


def _how_weights(one: Path, other: Path) -> str:
    from safetensors.torch import load_file

    mine, theirs = load_file(one), load_file(other)
    if {n: (t.dtype, t.shape) for n, t in mine.items()} != {n: (t.dtype, t.shape) for n, t in theirs.items()}:
        return "names, dtypes or shapes"
    errors = {name: float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine if mine[name].numel()}
    worst = max(errors, key=lambda name: errors[name])
    return f"{sum(error > 0 for error in errors.values())} of {len(errors)} tensors, most '{worst}', by {errors[worst]:.3g}"


def compare(cases: Path, before: Version, after: Version) -> tuple[list[tuple[str, int, int, int]], list[str]]:
    """A row of the table for each case, and the differences that nobody expects."""
    rows, unexpected = [], []
    for case in json.loads(cases.read_text()):
        mine, theirs = before.folder / case["folder"], after.folder / case["folder"]
        found = [f"{v.folder.name}: {failure}" for v in (before, after) for failure in v.failures.get(case["name"], [])]
        found += [f"{name}: {how}" for name, how in differences(mine, theirs) if not _expected(f"{case['folder']}/{name}")]
        compared = len(files_below(theirs))
        for one, other in case["same"]:
            compared += len(files_below(theirs / other))
            found += [f"{other}/{name} is not that of {one}: {how}" for name, how in differences(theirs / one, theirs / other)]
        if not compared:
            found.append("nothing was written")
        rows.append((case["name"], len(case["commands"]), compared, len(found)))
        unexpected += [f"{case['name']}: {difference}" for difference in found]
    return rows, unexpected


def _expected(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in EXPECTED)


def main() -> None:
    """Merge the zoo twice, compare, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder with the package acemerge of one version")
    parser.add_argument("after", type=Path, help="the same of the other")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it there")
    parser.add_argument("--only", default="*", help="cases to run, such as 'ray *'")
    arguments = parser.parse_args()
    started = time.perf_counter()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="zoo"))  # short: Ray makes sockets below TMPDIR
    before, after = (Version(getattr(arguments, name).resolve(), folder.resolve() / name) for name in ("before", "after"))
    try:
        for version in (before, after):
            version.folder.mkdir(parents=True)
        cases = make_zoo(folder.resolve(), before, arguments.only)
        running = [version.start(Path(__file__).with_name("run_commands.py"), cases) for version in (before, after)]
        for process in running:
            process.communicate()
        if any(process.returncode for process in running):
            sys.exit("one of the versions did not come to an end")
        rows, unexpected = compare(cases, before, after)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows), len(unexpected))
    print_table(("what was run", "commands", "files compared", "differences"), [*rows, total])
    print(f"\n{time.perf_counter() - started:.0f} s", *(f"expected: {name}: {why}" for name, why in EXPECTED.items()), sep="\n")
    print(*unexpected, sep="\n")
    sys.exit(1 if unexpected else 0)


if __name__ == "__main__":
    main()
