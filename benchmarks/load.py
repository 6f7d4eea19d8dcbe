"""Models of unusual shapes: very many experts, very many tensors, very long or empty ones, other dtypes, long names.

    python benchmarks/load.py --mergekit ENV/bin/mergekit-yaml          # some minutes; 2 GB of disk

Every case is a whole merge in a process of its own; `--by-chance SEED` gives them other sizes. Told are its processor time,
start-up excluded, and its anonymous memory beyond what the process took before, beside what the plan predicted. `--mergekit`
adds what a tensor costs beyond its arithmetic, with both tools in turn, each by its own command line: processor time of a merge
of many tiny tensors less that of one of few, for each tensor more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from end_to_end import Case, acemerge_command, mergekit_command
from footprint import run_command, watch
from llamas import Llama, write_models
from record import FOLDER, machine, print_table, save
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
_CHILD = """
import json, os, sys, tempfile, time
os.environ |= {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line does
import torch, acemerge
from safetensors.torch import save_file
folder, method, *experts = sys.argv[1:]
with tempfile.TemporaryDirectory() as first:  # what a first merge imports and makes belongs to the program
    for name in ("base", "expert"):
        os.mkdir(f"{first}/{name}")
        save_file({"layers.0.weight": torch.randn(64, 256)}, f"{first}/{name}/model.safetensors")
    acemerge.merge(f"{first}/base", [f"{first}/expert"], f"{first}/out", method=method, threads=1, quiet=True, force=True)
print("ready", flush=True); sys.stdin.readline(); started = time.process_time()
models = [f"{folder}/{name}" for name in experts]
result = acemerge.merge(f"{folder}/base", models, f"{folder}/merged", method=method, threads=1, quiet=True)
print("done", json.dumps([time.process_time() - started, result.plan.peak_memory]), flush=True); sys.stdin.readline()
"""


@dataclass(frozen=True)
class Load:
    """A case."""

    title: str
    tensors: Callable[[torch.Generator], Tensors]
    """Of the base."""
    experts: int = 4
    methods: tuple[str, ...] = ("ace", "task_arithmetic")
    settings: dict[str, Any] | None = None
    """Of its config."""


def plain(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], Tensors]:
    """Random numbers."""
    return lambda generator: {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def layers(count: int, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """A matrix each."""
    return {f"layers.{layer}.proj.weight": (rows, columns) for layer in range(count)}


def eight_bits(count: int, rows: int, columns: int) -> Callable[[torch.Generator], Tensors]:
    """Matrices of 8-bit floats, with a scale for each row."""

    def make(generator: torch.Generator) -> Tensors:
        found: Tensors = {}
        for name in layers(count, rows, columns):
            found[name] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            found[f"{name}_scale"] = torch.full((rows, 1), 0.01)
        return found

    return make


_EMPTY = {"layers.0.a.weight": (0, 8), "layers.0.b.weight": (8, 0), "layers.0.c.bias": (0,), "layers.0.d.weight": (8, 8)}
_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip


def cases(size: Callable[[int], int]) -> list[Load]:
    """All of them, every size of theirs passed through a function."""
    experts, count, rows, columns = size(64), size(200), size(128), size(128)
    tensors, names, long, doubles, bits = size(20_000), size(2_000), size(100_000), size(50), size(50)
    small, high, wide = size(8), size(256), size(256)
    return [
        Load(f"{experts} experts of {count} tensors of {rows} x {columns}", plain(layers(count, rows, columns)), experts=experts),
        Load(f"{tensors:,} tensors of {small} x {small}", plain(layers(tensors, small, small)), experts=2),
        Load(f"a matrix of 2 x {long:,}", plain(layers(1, 2, long))),
        Load(f"a matrix of {long:,} x 2", plain(layers(1, long, 2))),
        Load("empty tensors", plain(_EMPTY)),
        Load(f"{doubles} matrices of {high} x {wide} in float64", plain(layers(doubles, high, wide), torch.float64)),
        Load(f"{bits} matrices of {high} x {wide} in 8-bit floats with scales", eight_bits(bits, high, wide),
             settings={"quantization_config": _CHANNELS, "dtype": "bfloat16"}),
        Load(f"{names:,} names of 255 bytes",
             plain({f"layers.{i}.".ljust(248, "n") + ".weight": (small, small) for i in range(names)})),
    ]  # fmt: skip


def by_chance(seed: int) -> Callable[[int], int]:
    """From a third to one and a half of what it is."""
    chooser = random.Random(seed)
    return lambda size: max(2, round(size * chooser.uniform(0.33, 1.5)))


def write(load: Load, folder: Path) -> list[str]:
    """Base and experts; the experts' names."""
    names = [f"expert-{number}" for number in range(load.experts)]
    config = {"model_type": "nobody-heard-of-it", **(load.settings or {})}
    base = load.tensors(torch.Generator().manual_seed(0))
    for seed, name in enumerate(["base", *names]):
        generator = torch.Generator().manual_seed(seed)
        changed = {own: value if not seed else _near(value, own, generator) for own, value in base.items()}
        (folder / name).mkdir()
        save_file(changed, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config))
    return names


def _near(value: Tensor, name: str, generator: torch.Generator) -> Tensor:
    if name.endswith("_scale"):
        return value
    return (value.double() + 0.05 * torch.randn(value.shape, generator=generator)).to(value.dtype)


def measure(loads: list[Load], place: Path | None) -> Iterator[dict[str, Any]]:
    """Every case by every method."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for load in loads:
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            names = write(load, Path(temporary))
            for method in load.methods:
                found = watch(_CHILD, temporary, method, *names, environment=environment)
                seconds, predicted = json.loads(found.report)
                shutil.rmtree(Path(temporary) / "merged")
                yield {
                    "case": load.title, "experts": load.experts, "method": method, "cpu_seconds": seconds,
                    "peak_bytes": found.peak - found.before, "predicted_bytes": predicted,
                }  # fmt: skip


# --- beside mergekit ---------------------------------------------------------------------------------------------------


class Tiny(Llama):
    """Of tensors so small that nearly all of the time is spent around them."""

    @property
    def config(self) -> dict[str, object]:
        """With one head."""
        return {**super().config, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": self.hidden}


FEW = 22
TOOLS = ("acemerge", "mergekit")
LAYERS = (222, 555, 2222)
"""Of nine tensors each."""
_CASE = Case("tiny tensors", "task_arithmetic", ("alpha=0.3",), {"weight": 0.3})


def overheads(mergekit: Path, place: Path | None, repeats: int, layers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What a tensor costs in a model of so many layers, in seconds of processor time, by both tools in turn."""
    few = spent(mergekit, place, repeats, FEW)
    for count in layers:
        many = spent(mergekit, place, repeats, count)
        more = many["tensors"] - few["tensors"]
        of_one = {tool: (statistics.median(many[tool]) - statistics.median(few[tool])) / more for tool in TOOLS}
        yield {"few": few, "many": many, "of_a_tensor": of_one, "times_less": of_one["mergekit"] / of_one["acemerge"]}


def spent(mergekit: Path, place: Path | None, repeats: int, layers: int) -> dict[str, Any]:
    """Seconds of processor time of whole merges of such a model."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    llama = Tiny(layers, 8, 8, 8, 2)
    found: dict[str, Any] = {"tensors": len(list(llama.tensors())), "acemerge": [], "mergekit": []}
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        folder = Path(temporary)
        write_models(llama, folder)
        commands = {
            "acemerge": acemerge_command(_CASE, llama, folder, 1),
            "mergekit": mergekit_command(mergekit, _CASE, llama, folder, 1)
        }  # fmt: skip
        for _ in range(repeats):
            for name, command in commands.items():
                found[name].append(run_command(command, environment, folder / "log").cpu_seconds)
                shutil.rmtree(folder / "merged")
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, default=os.environ.get("MERGEKIT"), help="path of mergekit-yaml (or MERGEKIT)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases, from 0; none: only what is beside mergekit")
    parser.add_argument("--by-chance", type=int, metavar="SEED", help="other sizes: a third to one and a half of these")
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS, help="of the models that mergekit merges too")
    parser.add_argument("--repeats", type=int, default=1, help="of the runs beside mergekit")
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    parser.add_argument("--json", type=Path, default=FOLDER / "load.json")
    given = parser.parse_args()
    where = machine()
    every = cases(by_chance(given.by_chance) if given.by_chance is not None else lambda size: size)
    loads = [every[number] for number in given.only] if given.only is not None else every
    found, table = [], []
    for row in measure(loads, given.folder):
        found.append(row)
        memory = [f"{row[what] / 1e6:.0f}" for what in ("peak_bytes", "predicted_bytes")]
        table.append([row["case"], row["experts"], f"`{row['method']}`", f"{row['cpu_seconds']:.1f}", *memory])
        print(*table[-1], sep=" | ", file=sys.stderr, flush=True)
    print_table(["models", "experts", "method", "processor s", "peak MB", "predicted MB"], table)
    beside = []
    for one in overheads(given.mergekit, given.folder, given.repeats, given.layers) if given.mergekit else ():
        beside.append(one)
        seconds = ", ".join(f"{tool} {statistics.median(one['many'][tool]):.1f} s" for tool in TOOLS)
        of_one = ", ".join(f"{tool} {1e6 * one['of_a_tensor'][tool]:.0f} µs" for tool in TOOLS)
        print(f"{one['many']['tensors']} tensors: {seconds}; of one: {of_one}, {one['times_less']:.1f} times less", flush=True)
    save(given.json, where, {"cases": found, "beside_mergekit": beside})


if __name__ == "__main__":
    main()
