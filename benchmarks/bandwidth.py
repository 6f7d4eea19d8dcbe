"""How fast linear methods read and write, against `cp` of the same files.

    python benchmarks/bandwidth.py       # base and 4 experts of 1 GB: 12 GB of disk

`cp` reads and writes base and experts; a merge reads them all and writes one model. What counts is bytes read and written per
second, with the inputs in the page cache. `cp` returns before its copy is on the disk, a merge after; so `cp` is measured alone,
and with `sync` of its copy. The merge's time is that of `acemerge.merge`, headers and hashes included, without the start of
Python and torch. It hashes its inputs, unless they are in the hub's cache, where a file's name is its hash: both are measured.
Runs alternate and are repeated; the median counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from footprint import run_command, watch
from llamas import Llama, add_shapes, shapes_of, warm, write_models
from record import FOLDER, machine, print_table, save

from acemerge.checkpoints.content_hash import named_sha256

METHODS = ("average", "linear", "task_arithmetic")
_CHILD = """
import os, sys
os.environ |= {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line does
import torch, acemerge, acemerge.execute.pipeline
output, method, threads, base, experts = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:]
acemerge.merge_task_vectors(torch.randn(2, 64, 64), method=method)
print("ready", flush=True); sys.stdin.readline()
acemerge.merge(base, experts, output, method=method, threads=threads)
print("done", flush=True); sys.stdin.readline()
"""


def copy(llama: Llama, folder: Path, then: str = "true") -> float:
    """Seconds for cp."""
    models = " ".join(str(folder / name) for name in ("base", *llama.expert_names))
    return run_command(["sh", "-c", f"mkdir {folder}/out && cp -r {models} {folder}/out && {then}"]).seconds


def merge(models: Sequence[Path], output: Path, method: str, threads: int) -> float:
    """Seconds for a merge."""
    return watch(_CHILD, str(output), method, str(threads), *map(str, models)).seconds


def as_in_the_hub_cache(model: Path) -> Path:
    """The same model laid out as the hub's cache has it: each file is named by its hash, which need not be computed."""
    weights, hub = model / "model.safetensors", model.parent / "hub" / model.name
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "main").mkdir(parents=True)
    blob = hub / "blobs" / named_sha256(weights)
    blob.hardlink_to(weights)
    (hub / "snapshots" / "main" / weights.name).symlink_to(blob)
    shutil.copy(model / "config.json", hub / "snapshots" / "main")
    return hub / "snapshots" / "main"


def measure(llama: Llama, folder: Path, threads: int, repeats: int) -> dict[str, list[float]]:
    """Everything in turn, as often as asked."""
    models = [folder / name for name in ("base", *llama.expert_names)]
    cached = [as_in_the_hub_cache(model) for model in models]
    todo: dict[str, Callable[[], float]] = {
        "cp": partial(copy, llama, folder),
        "cp and sync": partial(copy, llama, folder, f"sync {folder}/out/*/*"),
        **{method: partial(merge, models, folder / "out", method, threads) for method in METHODS},
        **{f"{method}, hub cache": partial(merge, cached, folder / "out", method, threads) for method in METHODS},
    }
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(repeats):
        for name, work in todo.items():
            warm(folder)
            seconds[name].append(work())
            shutil.rmtree(folder / "out")
    return seconds


def rates(llama: Llama, measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Bytes moved per second, and their ratio to cp's."""
    found: list[dict[str, Any]] = []
    for name, seconds in measured.items():
        written = llama.experts + 1 if name.startswith("cp") else 1
        moved = 2 * llama.elements * (llama.experts + 1 + written)
        rate = moved / statistics.median(seconds)
        found.append({"command": name, "seconds": seconds, "bytes_moved": moved, "rate": rate})
    for row in found:
        row |= {"of_cp": row["rate"] / found[0]["rate"], "of_cp_and_sync": row["rate"] / found[1]["rate"]}
    return found


def main() -> None:
    """Make, copy, merge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    parser.add_argument("--json", type=Path, default=FOLDER / "bandwidth.json")
    add_shapes(parser)
    given = parser.parse_args()
    llama, where = shapes_of(given), machine()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write_models(llama, Path(folder))
        found = rates(llama, measure(llama, Path(folder), given.threads, given.repeats))
    print(f"{llama.describe()}; {given.threads} threads, median of {given.repeats}; {where['cpu']}, {where['date']}\n")
    print_table(
        ["command", "GB/s read and written", "of cp", "of cp and sync"],
        [[r["command"], f"{r['rate'] / 1e9:.2f}", f"{r['of_cp']:.0%}", f"{r['of_cp_and_sync']:.0%}"] for r in found],
    )
    save(given.json, where, {"models": asdict(llama), "threads": given.threads, "rows": found})


if __name__ == "__main__":
    main()
