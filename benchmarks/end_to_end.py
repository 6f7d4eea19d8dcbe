"""Whole merges by acemerge and by mergekit, from the command line to the published folder: time and peak anonymous memory.

    python benchmarks/end_to_end.py --mergekit ENV/bin/mergekit-yaml      # base and 4 experts of 1 GB: 7 GB of disk

The path of mergekit 0.1.5's command can also be in the environment variable MERGEKIT. Both tools get the same files, the same
number of threads and the same dtype for the output. Runs alternate and are repeated; the median counts. The files are read once
before, so that they are in the page cache for both. acemerge also hashes every input and every output, and waits until the output
has reached the disk; mergekit does neither. Processor time, user's and system's, is told beside the time that passed: where other
programs run, it is the steadier of the two.

`ties` is the same work on both sides with one threshold per tensor, the only kind that mergekit has; acemerge's default, one
threshold for the whole model, is a row of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from footprint import Run, run_command
from llamas import Llama, add_shapes, shapes_of, warm, write_models
from record import FOLDER, machine, print_table, save

TOOLS = ("acemerge", "mergekit")


@dataclass(frozen=True)
class Case:
    """The same merge as each tool says it; without `theirs`, ours alone beside their run of that name."""

    title: str
    method: str
    options: tuple[str, ...]
    theirs: dict[str, float] = field(default_factory=dict)
    weights: tuple[float, ...] = ()
    """Of the experts, where they differ."""


CASES = (
    Case("linear", "linear", (), {"weight": 1.0}),
    Case("linear, a weight each", "linear", ("weights=0.1,0.2,0.3,0.4",), {"weight": 1.0}, (0.1, 0.2, 0.3, 0.4)),
    Case("task_arithmetic", "task_arithmetic", ("alpha=0.3",), {"weight": 0.3}),
    Case("ties", "ties", ("keep=0.2", "scope=tensor"), {"weight": 1.0, "density": 0.2}),
    Case("ties, whole-model threshold", "ties", ("keep=0.2",)),
)


def acemerge_command(case: Case, llama: Llama, folder: Path, threads: int) -> list[str | Path]:
    """Our command line."""
    options = [part for option in case.options for part in ("-s", option)]
    experts = [folder / name for name in llama.expert_names]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "acemerge",
        "merge",
        folder / "base",
        *experts,
        "-m",
        case.method,
        *options,
    ]
    return [*command, "-o", folder / "merged", "--threads", str(threads), "-q"]


def mergekit_command(tool: Path, case: Case, llama: Llama, folder: Path, threads: int) -> list[str | Path]:
    """Theirs, and its recipe."""
    weights = case.weights or (case.theirs["weight"],) * llama.experts
    models = [
        {"model": str(folder / name), "parameters": {**case.theirs, "weight": weight}}
        for name, weight in zip(llama.expert_names, weights, strict=True)
    ]
    recipe: dict[str, Any] = {"merge_method": case.method, "models": models, "dtype": "bfloat16"}
    if case.method != "linear":
        recipe["base_model"] = str(folder / "base")
    path = folder / f"{case.method}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return [tool, path, folder / "merged", "--no-copy-tokenizer", "--lazy-unpickle", "--quiet", "-j", str(threads)]


def measure(commands: dict[str, list[str | Path]], folder: Path, threads: int, repeats: int) -> dict[str, list[Run]]:
    """Run the commands in turn, as often as asked."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else sources that pip has not compiled are compiled in every run
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            os.sync()  # what the one before left to be written is not this one's work
            runs[name].append(run_command(command, environment, folder / "log"))
            weights = folder / "merged" / "model.safetensors"
            assert weights.stat().st_size > 0.99 * (folder / "base" / "model.safetensors").stat().st_size
            shutil.rmtree(folder / "merged")
    return runs


def rows(tool: Path, llama: Llama, folder: Path, threads: int, repeats: int, methods: list[str]) -> Iterator[dict[str, Any]]:
    """What each case of these methods took."""
    theirs: list[Run] = []
    for case in (case for case in CASES if case.method in methods):
        warm(folder)
        commands = {"acemerge": acemerge_command(case, llama, folder, threads)}
        if case.theirs:
            commands["mergekit"] = mergekit_command(tool, case, llama, folder, threads)
        runs = measure(commands, folder, threads, repeats)
        theirs = runs.get("mergekit", theirs)
        ours = runs["acemerge"]
        yield {
            "case": case.title,
            "seconds": {"acemerge": [run.seconds for run in ours], "mergekit": [run.seconds for run in theirs]},
            "cpu_seconds": {"acemerge": [run.cpu_seconds for run in ours], "mergekit": [run.cpu_seconds for run in theirs]},
            "peak_bytes": {"acemerge": max(run.peak for run in ours), "mergekit": max(run.peak for run in theirs)},
            "times_faster": statistics.median(r.seconds for r in theirs) / statistics.median(r.seconds for r in ours),
            "times_less_work": statistics.median(r.cpu_seconds for r in theirs) / statistics.median(r.cpu_seconds for r in ours),
            "memory_ratio": max(run.peak for run in theirs) / max(run.peak for run in ours),
        }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, default=os.environ.get("MERGEKIT"), help="path of mergekit-yaml (or MERGEKIT)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--methods", nargs="+", default=[case.method for case in CASES], help="only these; mergekit is slow at ties"
    )
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    parser.add_argument("--json", type=Path, default=FOLDER / "end_to_end.json")
    add_shapes(parser)
    return parser.parse_args()


def report(found: list[dict[str, Any]]) -> None:
    """The table."""
    columns = ["merge", "acemerge s", "mergekit s", "times faster", "processor: acemerge s", "mergekit s", "times less"]
    columns += ["acemerge MB", "mergekit MB", "times less"]
    table = []
    for row in found:
        seconds = [f"{statistics.median(row['seconds'][tool]):.1f}" for tool in TOOLS]
        work = [f"{statistics.median(row['cpu_seconds'][tool]):.1f}" for tool in TOOLS]
        memory = [f"{row['peak_bytes'][tool] / 1e6:.0f}" for tool in TOOLS]
        ratios = [f"{row[ratio]:.1f}" for ratio in ("times_faster", "times_less_work", "memory_ratio")]
        table.append([row["case"], *seconds, ratios[0], *work, ratios[1], *memory, ratios[2]])
    print_table(columns, table)


def main() -> None:
    """Make, merge, report."""
    given = arguments()
    if given.mergekit is None or not Path(given.mergekit).is_file():
        print("skipped: no mergekit to compare with; give --mergekit ENV/bin/mergekit-yaml or set MERGEKIT")
        return
    llama, where = shapes_of(given), machine()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write_models(llama, Path(folder))
        found = list(rows(Path(given.mergekit), llama, Path(folder), given.threads, given.repeats, given.methods))
    print(f"{llama.describe()}; {given.threads} threads, median of {given.repeats}; {where['cpu']}, {where['date']}\n")
    report(found)
    save(given.json, where, {"models": asdict(llama), "threads": given.threads, "rows": found})


if __name__ == "__main__":
    main()
