"""ACE, TSV-M, Iso-CTS and WUDI against each other, as published and as acemerge does them, on one block of a vision transformer.

    python benchmarks/methods_speed.py                      # one block of ViT-L/14, 8 experts, all threads: about fifteen minutes
    python benchmarks/methods_speed.py --model vit-b16 --threads 1

Same tensors, interleaved, medians. ACE takes its heterogeneous branch, the dearer one. The steps of WUDI all cost the same: its
time is measured with few steps and with some more, and continued to 300 and 1000. Memory is the peak of a process that merges
the block's largest matrix, beyond what it held with the task vectors loaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from footprint import watch
from layers import BLOCKS, interleaved, make_experts
from published import published_ace, published_iso_cts, published_tsv_m, published_wudi
from record import FOLDER, machine, save
from torch import Tensor

from acemerge.execute.compute import compute_threads
from acemerge.methods import get_method

FEW_STEPS, MORE_STEPS = 2, 6


def our_method(name: str, options: dict[str, Any], task_vectors: Tensor) -> Tensor:
    """Acemerge's own route."""
    method = get_method(name)
    return method(task_vectors, method.options(options)).delta


def _published_ace(task_vectors: Tensor) -> Tensor:
    return published_ace(task_vectors, heterogeneous=True)


Route = Callable[[Tensor], Tensor]
ROUTES: dict[str, Route] = {
    "ace ours": partial(our_method, "ace", {"epsilon": 1e-5, "tau": 0.0}),
    "ace published": _published_ace,
    "tsv_m ours": partial(our_method, "tsv_m", {}),
    "tsv_m published": published_tsv_m,
    "iso_cts ours": partial(our_method, "iso_cts", {}),
    "iso_cts published": published_iso_cts,
}


def wudi(steps: int) -> dict[str, Route]:
    """WUDI with so many steps."""
    ours = partial(our_method, "wudi", {"steps": steps})
    return {f"wudi {steps} ours": ours, f"wudi {steps} published": partial(published_wudi, steps=steps)}


@dataclass(frozen=True)
class Cost:
    """A method's time for the whole block, and its memory for the block's largest matrix."""

    method: str
    who: str
    seconds: float
    peak_bytes: int


def block_seconds(model: str, repeats: int) -> dict[str, float]:
    """Each route's time for all matrices of a block."""
    block = BLOCKS[model]
    total: dict[str, float] = {}
    for route in (*ROUTES.values(), *wudi(1).values()):
        route(make_experts(2, (64, 64)))  # whatever is loaded at the first use
    for shape, count in block.matrices.items():
        given = make_experts(block.tasks, shape)
        routes = {name: partial(route, given) for name, route in ROUTES.items()}
        found = interleaved(routes, repeats)
        few_and_more = {**wudi(FEW_STEPS), **wudi(MORE_STEPS)}
        found |= interleaved({name: partial(route, given) for name, route in few_and_more.items()}, repeats)
        for who in ("ours", "published"):
            few, more = (found.pop(f"wudi {steps} {who}") for steps in (FEW_STEPS, MORE_STEPS))
            step = (more - few) / (MORE_STEPS - FEW_STEPS)
            found |= {f"wudi {steps} steps {who}": few + (steps - FEW_STEPS) * step for steps in (300, 1000)}
        for name, seconds in found.items():
            total[name] = total.get(name, 0.0) + count * seconds
    return total


_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from methods_speed import BLOCKS, ROUTES, FEW_STEPS, compute_threads, make_experts, wudi
model, name, count = sys.argv[2], sys.argv[3], int(sys.argv[4])
routes = {**ROUTES, **wudi(FEW_STEPS)}
shape = max(BLOCKS[model].matrices, key=lambda shape: (shape[0] * shape[1], shape[1]))
with compute_threads(count):
    routes[name](make_experts(2, (64, 64)))
    given = make_experts(BLOCKS[model].tasks, shape)
    print("ready", flush=True); sys.stdin.readline()
    routes[name](given)
    print("done", flush=True); sys.stdin.readline()
"""


def peak_memory(model: str, name: str, count: int) -> int:
    """Bytes beyond the task vectors; WUDI's do not depend on its steps."""
    return _peak_of_route(model, f"wudi {FEW_STEPS} {name.split()[-1]}" if name.startswith("wudi") else name, count)


@cache
def _peak_of_route(model: str, route: str, count: int) -> int:
    """The same, in a process of its own."""
    run = watch(_CHILD, str(Path(__file__).parent), model, route, str(count))
    return run.peak - run.before


def show(costs: list[Cost]) -> Iterator[str]:
    """A table with acemerge's ACE as the measure."""
    reference = next(cost for cost in costs if (cost.method, cost.who) == ("ace", "ours"))
    published = {cost.method: cost.seconds for cost in costs if cost.who == "published"}
    yield "| method | | seconds | times our ACE | times faster than published | peak MB |"
    yield "|---|---|---:|---:|---:|---:|"
    for cost in costs:
        against = f"{published[cost.method] / cost.seconds:.1f}x" if cost.who == "ours" else ""
        times = f"{cost.seconds / reference.seconds:.1f}"
        yield f"| {cost.method} | {cost.who} | {cost.seconds:.2f} | {times} | {against} | {cost.peak_bytes / 1e6:.0f} |"


def main() -> None:
    """Measure, print a table, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BLOCKS), default="vit-l14")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=FOLDER / "methods_speed.json", help="where to write the measurements")
    arguments = parser.parse_args()
    where = machine()
    with compute_threads(arguments.threads):
        seconds = block_seconds(arguments.model, arguments.repeats)
    costs = []
    for name, own in seconds.items():
        method, who = name.rsplit(" ", 1)
        costs.append(Cost(method, who, own, peak_memory(arguments.model, name, arguments.threads)))
    block = BLOCKS[arguments.model]
    print(f"One block of {block.name}, {block.tasks} experts, {arguments.threads} threads\n")
    print("\n".join(show(costs)))
    save(arguments.json, where, {"model": arguments.model, "threads": arguments.threads, "costs": [asdict(own) for own in costs]})


if __name__ == "__main__":
    main()
