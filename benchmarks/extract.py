"""A LoRA adapter of a full fine-tune, by acemerge and by mergekit, from the command line to the published folder.

    python benchmarks/extract.py --mergekit ENV/bin/mergekit-extract-lora      # two models of 0.4 GB: 1 GB of disk

The path of mergekit 0.1.5's command can also be in the environment variable MERGEKIT_EXTRACT. Both tools get the same files, the
same number of threads, the same rank, and the same matrices: all linear layers but the output layer. Runs alternate and are
repeated; the median counts. The change is noise of a flat spectrum with some strong directions on it. mergekit decomposes every
matrix in full; acemerge uses random projections and measures what they miss, and hashes every input and output.

Beside the times: how much of the change each adapter lacks, measured here from the files, in float64.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from footprint import Run, run_command
from llamas import Llama, add_shapes, shapes_of, warm, write_models
from record import FOLDER, machine, print_table, save

from acemerge.checkpoints.formats.registry import open_file

DEFAULT = Llama(layers=4, hidden=1536, inner=4096, vocabulary=8_000, experts=1)
PREFIX = "base_model.model."


def acemerge_command(llama: Llama, folder: Path, rank: int, threads: int) -> list[str | Path]:
    """Our command line."""
    models = [folder / "base", folder / llama.expert_names[0]]
    command: list[str | Path] = [sys.executable, "-m", "acemerge", "extract", *models, "-o", folder / "acemerge"]
    return [*command, "--rank", str(rank), "--dtype", "bfloat16", "--threads", str(threads), "-q"]


def mergekit_command(tool: Path, llama: Llama, folder: Path, rank: int, threads: int) -> list[str | Path]:
    """Theirs."""
    models: list[str | Path] = ["--model", folder / llama.expert_names[0], "--base-model", folder / "base"]
    only = ["--skip-undecomposable", "-e", "lm_head", "-e", "embed_tokens", "-e", "norm"]
    size = ["--max-rank", str(rank), "--num-threads", str(threads)]
    return [tool, *models, "--out-path", folder / "mergekit", *size, *only, "--lazy-unpickle"]


def add_strong_directions(llama: Llama, folder: Path) -> None:
    """What training adds to a matrix has a few strong directions; the synthetic models' noise has none."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / llama.expert_names[0] / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(2)
    for name, value in tensors.items():
        if value.dim() == 2:
            left, right = (torch.randn(size, 24, generator=generator) for size in value.shape)
            strength = torch.arange(1, 25) ** -0.5 * 0.002
            tensors[name] = (value.float() + (left * strength) @ right.T).to(value.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def lacking(llama: Llama, folder: Path, adapter: Path) -> tuple[float, int]:
    """|D - B A| / |D| over all matrices that the adapter has, and how many those are."""
    lost = total = 0.0
    modules = 0
    base, tuned = (open_file(folder / name / "model.safetensors") for name in ("base", llama.expert_names[0]))
    factors = open_file(adapter / "adapter_model.safetensors")
    for key in factors.tensors:
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removesuffix(".lora_A.weight")
        weight = f"{module.removeprefix(PREFIX)}.weight"
        change = tuned.read(weight).double() - base.read(weight).double()
        product = factors.read(f"{module}.lora_B.weight").double() @ factors.read(key).double()
        lost, total, modules = lost + float((change - product).square().sum()), total + float(change.square().sum()), modules + 1
    return math.sqrt(lost / total), modules


def measure(commands: Mapping[str, list[str | Path]], llama: Llama, folder: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Run the commands in turn, as often as asked; then look at what each wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            runs[name].append(run_command(command, environment, folder / "log"))
    errors = {name: lacking(llama, folder, folder / name) for name in commands}
    return {
        name: {
            "seconds": [run.seconds for run in own],
            "cpu_seconds": [run.cpu_seconds for run in own],
            "peak_bytes": max(run.peak for run in own),
            "relative_error": errors[name][0],
            "matrices": errors[name][1],
        }
        for name, own in runs.items()
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool = os.environ.get("MERGEKIT_EXTRACT")
    parser.add_argument("--mergekit", type=Path, default=tool, help="path of mergekit-extract-lora (or MERGEKIT_EXTRACT)")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    parser.add_argument("--json", type=Path, default=FOLDER / "extract.json")
    add_shapes(parser, DEFAULT)
    return parser.parse_args()


def main() -> None:
    """Make, extract, report."""
    given = arguments()
    if given.mergekit is None or not Path(given.mergekit).is_file():
        print("skipped: no mergekit to compare with; give --mergekit ENV/bin/mergekit-extract-lora or set MERGEKIT_EXTRACT")
        return
    llama, where = shapes_of(given), machine()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        write_models(llama, folder)
        add_strong_directions(llama, folder)
        warm(folder)
        commands = {
            "acemerge": acemerge_command(llama, folder, given.rank, given.threads),
            "mergekit": mergekit_command(given.mergekit, llama, folder, given.rank, given.threads),
        }
        found = measure(commands, llama, folder, given.threads, given.repeats)
    medians = {tool: statistics.median(own["seconds"]) for tool, own in found.items()}
    times_faster = medians["mergekit"] / medians["acemerge"]
    print(f"{llama.describe()}; rank {given.rank}, {given.threads} threads, median of {given.repeats}; {where['cpu']}\n")
    rows = [
        [tool, f"{medians[tool]:.1f}", f"{own['peak_bytes'] / 1e6:.0f}", f"{own['relative_error']:.4f}", own["matrices"]]
        for tool, own in found.items()
    ]
    print_table(["tool", "seconds", "peak MB", "relative error", "matrices"], rows)
    print(f"\nacemerge is {times_faster:.1f} times as fast")
    content = {"models": asdict(llama), "rank": given.rank, "threads": given.threads, "times_faster": times_faster, **found}
    save(given.json, where, content)


if __name__ == "__main__":
    main()
