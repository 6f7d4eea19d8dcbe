"""Merges on a Ray cluster of this machine while its processes are killed, one at a random moment of each.

    python benchmarks/ray_deaths.py --runs 50

A merge into 20 shards is started again and again. In turn a worker, the raylet (the machine's daemon), the cluster's head with
all its processes, or the driver (the merge itself) gets SIGKILL: a moment after so many shards are finished, both at random. Then
the output must be whole, with the bytes of a local merge, or absent with one sentence of error. The merge must end in time, and
no process of its cluster may outlive it for long. At last the same command, without Ray, must go on and end with the same bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from record import print_table
from safetensors.torch import save_file

SHARDS = 20
VICTIMS = ("worker", "raylet", "head", "driver")
ENDING_SECONDS = 180
"""How long a cluster's processes may take to notice that they are alone."""
_AGENT = re.compile(r"ray::\w+Agent\b")
"""Ray's own, without which its raylet ends."""
_HEAD = ("gcs_server", "raylet", "ray/dashboard", "log_monitor", "runtime_env", "ray::")


@dataclass(frozen=True)
class End:
    """What came of one run."""

    victim: str
    after: int
    """Shards that were finished."""
    code: int
    seconds: float
    said: str
    output: str
    orphans: Sequence[str]
    alone: float
    """Seconds from the merge's end to that of the last process of its cluster."""
    again: str

    @property
    def problems(self) -> list[str]:
        """The promises that were not kept."""
        found = []
        if self.output not in ("whole", "absent"):
            found.append(f"output {self.output}")
        if self.code == 0 and self.output != "whole":
            found.append("success without an output")
        if self.code not in (0, 1, -signal.SIGKILL) or (self.code < 0) != (self.victim == "driver"):
            found.append(f"exit code {self.code}")
        if self.code == 1 and not self.said.startswith("acemerge: error:"):
            found.append("no sentence")
        if self.orphans:
            found.append(f"orphans: {', '.join(self.orphans)}")
        if self.again != "same bytes":
            found.append(f"again: {self.again}")
        return found


def write_models(folder: Path, width: int) -> list[Path]:
    """A base and three experts, one matrix for each shard."""
    folders = [folder / name for name in ("base", "a", "b", "c")]
    for seed, place in enumerate(folders):
        place.mkdir(parents=True)
        torch.manual_seed(0)
        tensors = {f"layers.{i}.weight": torch.randn(width, width) / width**0.5 for i in range(SHARDS)}
        torch.manual_seed(seed)
        moved = {name: value + 0.01 * torch.randn_like(value) * bool(seed) for name, value in tensors.items()}
        save_file(moved, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text('{"model_type": "nobody-heard-of-it"}')
    return folders


@dataclass(frozen=True)
class Cluster:
    """One run's merge, and all processes that it starts."""

    models: Sequence[Path]
    output: Path
    width: int

    def command(self, engine: str) -> list[str]:
        """The merge."""
        shard = f"{self.width * self.width * 4 + 4000}B"
        return [
            sys.executable, "-m", "acemerge", "merge", *map(str, self.models), "-o", str(self.output), "-m", "ace",
            "--shard-size", shard, "--threads", "1", "--engine", engine,
        ]  # fmt: skip

    def environment(self, place: Path) -> dict[str, str]:
        """Ray makes its files in a place of their own."""
        more = {"RAY_TMPDIR": str(place), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        return {**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, **more}


def of_cluster(place: Path) -> list[psutil.Process]:
    """All that live of what was started with Ray's files in this place, by their environment or a log that they hold open.

    Ray's agents overwrite their environment. To be the parent of all would keep workers alive: they end when theirs is process 1.
    """
    return [process for process in psutil.process_iter() if lives(process) and belongs_to(process, place)]


def belongs_to(process: psutil.Process, place: Path) -> bool:
    """Nobody else's: what may not be looked at is not ours."""
    try:
        if process.environ().get("RAY_TMPDIR") == str(place):
            return True
        return any(Path(file.path).is_relative_to(place) for file in process.open_files())
    except psutil.Error:
        return False


def lives(process: psutil.Process) -> bool:
    """A zombie does not, and who asks too late is told so."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def name_of(process: psutil.Process) -> str:
    """What it was started as; a process that is gone has no name."""
    try:
        return " ".join(process.cmdline())[:300]
    except psutil.Error:
        return ""


def victims(place: Path, victim: str, driver: int) -> list[psutil.Process]:
    """The processes to kill."""
    named = {process: name_of(process) for process in of_cluster(place) if process.pid != driver}
    if victim == "driver":
        return [psutil.Process(driver)]
    if victim == "worker":
        return [process for process, name in named.items() if name.startswith("ray::") and not _AGENT.match(name)][:1]
    if victim == "raylet":
        return [process for process, name in named.items() if "/raylet/raylet" in name]
    return [process for process, name in named.items() if any(part in name for part in _HEAD)]


def tree(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def finished_shards(cluster: Cluster) -> int:
    """As far as the folder beside the output shows; all of them when it has become the output. -1: it is not there yet."""
    partial = cluster.output.with_name(cluster.output.name + ".partial")
    return SHARDS if cluster.output.exists() else len(list(partial.glob("model*"))) if partial.exists() else -1


def run(cluster: Cluster, victim: str, after: int, pause: float, limit: float, whole: Mapping[str, bytes]) -> End | None:
    """Kill a moment after so many shards, and wait for the end; None if there was nobody to kill any more."""
    with (
        tempfile.TemporaryDirectory(prefix="ace", dir="/tmp", ignore_cleanup_errors=True) as place,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(cluster.command("ray"), stdout=errors, stderr=errors, env=cluster.environment(Path(place))) as process,
    ):
        while process.poll() is None and finished_shards(cluster) < after:
            time.sleep(0.002)
        time.sleep(pause)
        started = time.monotonic()
        found = victims(Path(place), victim, process.pid) if process.poll() is None else []
        for chosen in found:
            chosen.kill()
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            code = 999
        seconds = time.monotonic() - started
        errors.seek(0)
        said = ["", *errors.read().strip().splitlines()][-1]
        ended = time.monotonic()
        orphans = left_over(Path(place))
        alone = time.monotonic() - ended
    if not found:
        return None
    output = "absent" if not cluster.output.exists() else "whole" if tree(cluster.output) == whole else "other bytes"
    return End(victim, after, code, seconds, said, output, orphans, alone, go_on(cluster, whole))


def left_over(place: Path) -> list[str]:
    """Processes of the cluster that do not end by themselves; ended here, so that they disturb nothing else."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (left := of_cluster(place)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [name_of(process) for process in left]
    for process in left:
        process.kill()
    return names


def go_on(cluster: Cluster, whole: Mapping[str, bytes]) -> str:
    """The same merge without Ray takes what is finished, and ends with the same bytes."""
    if not cluster.output.exists():
        ended = subprocess.run(cluster.command("local"), capture_output=True, text=True, check=False)
        if ended.returncode:
            return ended.stderr.strip().splitlines()[-1]
    beside = [path.name for path in cluster.output.parent.glob(f"{cluster.output.name}.*") if not path.name.endswith(".lock")]
    return f"left {beside}" if beside else "same bytes" if tree(cluster.output) == whole else "other bytes"


def main() -> None:
    """Print a line for each run, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a merge counts as endless")
    parser.add_argument("--width", type=int, default=256, help="of the square matrices")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds at most from a shard's end to the kill")
    parser.add_argument("--only", choices=VICTIMS, help="kill nothing else")
    given = parser.parse_args()
    choose, ends = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write_models(folder / "models", given.width)
        local = Cluster(models, folder / "local", given.width)
        subprocess.run(local.command("local"), check=True, capture_output=True)
        whole = tree(local.output)
        assert sum(file.endswith(".safetensors") for file in whole) == SHARDS
        for number in range(given.runs):
            cluster = Cluster(models, folder / f"out-{number}", given.width)
            victim = given.only or VICTIMS[number % len(VICTIMS)]
            while True:
                after, pause = choose.randrange(SHARDS), choose.uniform(0, given.pause)
                if (end := run(cluster, victim, after, pause, given.limit, whole)) is not None:
                    break
                print(f"{number + 1}/{given.runs} {victim} after {after} shards: was over before; again", flush=True)
                shutil.rmtree(cluster.output, ignore_errors=True)
            ends.append(end)
            print(
                f"{number + 1}/{given.runs} {victim} after {end.after} shards: exit {end.code} {end.seconds:.1f} s later, output "
                f"{end.output}, its cluster {end.alone:.0f} s after; {'; '.join(end.problems) or 'as promised'} {end.said}",
                flush=True,
            )
    report(ends)
    sys.exit(any(end.problems for end in ends))


def report(ends: Sequence[End]) -> None:
    """Of each victim, how the merges ended."""
    lines = []
    for victim in VICTIMS:
        own = [end for end in ends if end.victim == victim]
        counts = Counter("whole" if end.code == 0 else "killed itself" if end.code < 0 else f"exit {end.code}" for end in own)
        lines.append(
            [victim, len(own), ", ".join(f"{count} {how}" for how, count in sorted(counts.items())),
             f"{max((end.seconds for end in own), default=0):.0f}", f"{max((end.alone for end in own), default=0):.0f}",
             sum(len(end.problems) for end in own)]
        )  # fmt: skip
    print_table(
        ["killed", "runs", "ended", "longest, s", "cluster after it, s", "problems"], [list(map(str, line)) for line in lines]
    )


if __name__ == "__main__":
    main()
