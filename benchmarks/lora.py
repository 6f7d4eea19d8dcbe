"""LoRA adapters merged in their low-rank core against the same adapters merged as whole matrices, in one run.

    python benchmarks/lora.py                                # 8 adapters of rank 16, a layer of a 7B Llama: about half an hour
    python benchmarks/lora.py --hidden 512 --inner 1408      # a quick look

Three routes do the same ACE merge of the same files, tensor by tensor, each in a process of its own:

    adapter    core in, adapter out (--as adapter): no whole matrix anywhere
    core       core in, whole weights out: the default for adapters
    dense      every adapter expanded to its matrix first: what tools do that know full models only

The cheap routes are measured several times, before and after the dense one, and the median counts. What is measured is merging:
nothing is written, and the pages of the inputs are in the page cache.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from footprint import Footprint, watch
from shapes import asked_for


@dataclass(frozen=True)
class Shapes:
    """Some layers of a Llama, and adapters on all seven projections of each."""

    layers: int = 1
    hidden: int = 4096
    inner: int = 11008
    adapters: int = 8
    rank: int = 16

    def projections(self) -> Iterator[tuple[str, int, int]]:
        """Module, outputs, inputs."""
        for i in range(self.layers):
            for name in "qkvo":
                yield f"model.layers.{i}.self_attn.{name}_proj", self.hidden, self.hidden
            for name in ("gate", "up"):
                yield f"model.layers.{i}.mlp.{name}_proj", self.inner, self.hidden
            yield f"model.layers.{i}.mlp.down_proj", self.hidden, self.inner


def make_models(shapes: Shapes, folder: Path) -> None:
    """A base in bfloat16 and adapters of unequal strength, so that the heterogeneous branch runs, which costs most."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    base = {
        f"{module}.weight": (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)
        for module, rows, columns in shapes.projections()
    }
    (folder / "base").mkdir(parents=True)
    (folder / "base" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(base, folder / "base" / "model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": shapes.rank, "lora_alpha": shapes.rank, "target_modules": "all-linear"}
    for index in range(shapes.adapters):
        factors = {}
        for module, rows, columns in shapes.projections():
            strength = 0.02 * 3.0 ** (-index)
            factors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(shapes.rank, columns, generator=generator) * 0.02
            factors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, shapes.rank, generator=generator) * strength
        target = folder / f"adapter-{index}"
        target.mkdir()
        (target / "adapter_config.json").write_text(json.dumps(settings))
        save_file(factors, target / "adapter_model.safetensors", metadata={"format": "pt"})


# Runs in the measured process: imports, a small merge to warm up, the plan; then the tensors, one after the other.
_CHILD = """
import os; os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import sys
from dataclasses import replace
from pathlib import Path
import torch, acemerge
from acemerge.execute.opening import find_sources, make_plan
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.factoring import merge_to_factors
from acemerge.tensors.merging import merge_tensor
acemerge.merge_task_vectors(torch.randn(2, 64, 64), "ace", tau=0.0)
folder, adapters, route = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
recipe = make_recipe({
    "base": str(folder / "base"), "experts": [str(folder / f"adapter-{i}") for i in range(adapters)],
    "method": "ace", "save_as": "adapter" if route == "adapter" else "model"})
plan = make_plan(recipe, find_sources(recipe))
cpu, largest = torch.device("cpu"), 0
print("ready", flush=True); sys.stdin.readline()
branches = set()
for tensor in plan.tensors:
    assert tensor.fate.core.sides == "both"
    if route == "adapter":
        merged = merge_to_factors(plan, tensor, cpu, None)
    else:
        merged = merge_tensor(plan, replace(tensor, fate=replace(tensor.fate, core=None)) if route == "dense" else tensor, cpu)
    branches.add(merged.facts["branch"])
    del merged
print("done", *branches, flush=True); sys.stdin.readline()
"""


@dataclass(frozen=True)
class Route:
    """The median of a route's runs."""

    seconds: float
    peak: int
    runs: int
    branches: str

    @classmethod
    def of(cls, runs: list[Footprint]) -> Route:
        """The median time; the largest peak beyond what the process took before."""
        peak = max(run.peak - run.before for run in runs)
        return cls(statistics.median(run.seconds for run in runs), peak, len(runs), runs[0].report.strip())


def measure(shapes: Shapes, folder: Path, repeats: int = 3) -> dict[str, Route]:
    """Every route, the cheap ones before and after the dear one."""
    runs: dict[str, list[Footprint]] = {"adapter": [], "core": [], "dense": []}
    for route in (*(["adapter", "core"] * repeats), "dense", *(["adapter", "core"] * repeats)):
        runs[route].append(watch(_CHILD, str(folder), str(shapes.adapters), route))
    return {route: Route.of(own) for route, own in runs.items()}


def main() -> None:
    """Make, merge, report."""
    with asked_for(__doc__, Shapes()) as (shapes, folder):
        make_models(shapes, folder)
        routes = measure(shapes, folder)
    dense = routes["dense"]
    whole = max(rows * columns for _, rows, columns in shapes.projections()) * 4
    print(f"{shapes}; ACE, {dense.branches}; the largest matrix takes {whole / 1e6:.0f} MB in float32")
    print(f"{'route':8} {'seconds':>9} {'dense is':>9} {'peak MB':>9} {'dense is':>9} {'runs':>5}")
    for name, route in routes.items():
        times, memory = dense.seconds / route.seconds, dense.peak / max(1, route.peak)
        print(f"{name:8} {route.seconds:9.2f} {times:8.1f}x {route.peak / 1e6:9.0f} {memory:8.1f}x {route.runs:5}")


if __name__ == "__main__":
    main()
