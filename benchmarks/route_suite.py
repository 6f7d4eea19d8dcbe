"""Adapters merged for each test row by how near it is to their tasks' rows, beside fixed merges of the same adapters.

    python benchmarks/route_suite.py text-8 --limit 40

Adapters are extracted from the suite's experts of seed 0. A row's embedding is the base's own, the mean over its tokens; a
centroid is that of training rows. Every row is answered under its own task's head, as in all tables of the suite; the task itself
is not used for the weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import acemerge
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.routing.index import Kernel, write_index
from acemerge.routing.weights import centroid_of

Rows = list[tuple[dict[str, Tensor], int]]
"""Each row as the model takes it, and its class."""
Weights = Callable[[str, int], Mapping[str, float]]
"""Of a task and a row's number."""


def rows_of(suite: Suite, task: Any, part: str, count: int) -> Rows:
    """One by one."""
    split = getattr(task.load(), part).first(count)
    prepared = suite.domain.prepare(split)
    labels = torch.as_tensor(split.labels).tolist()
    return [(prepared.batch(torch.tensor([i])), int(labels[i])) for i in range(len(prepared.lengths))]


def embed(backbone: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the base's last states."""
    with torch.inference_mode():
        states = backbone(**batch).last_hidden_state[0]
    return states[batch["attention_mask"][0].bool()].mean(0) if "attention_mask" in batch else states.mean(0)


def extract_adapters(suite: Suite, folder: Path, rank: int) -> dict[str, Path]:
    """Of every expert, once."""
    found = {}
    for name, expert in suite.folders(0).items():
        found[name] = folder / "adapters" / name
        if not found[name].is_dir():
            acemerge.extract(suite.experts(0).base, expert, found[name], rank=rank, quiet=True)
    return found


def share_right(
    suite: Suite, models: dict[str, Any], tests: dict[str, Rows], merge: Callable[[str, int], object]
) -> dict[str, float]:
    """Of every task, the rows that are answered right after `merge(task, row)`."""
    scores = {}
    for task, rows in tests.items():
        right = 0
        for number, (batch, label) in enumerate(rows):
            merge(task, number)
            with torch.inference_mode():
                right += int(suite.domain.logits(models[task], batch)[0].argmax()) == label
        scores[task] = right / len(rows)
    return scores


KERNELS = {"nearest": Kernel(top=1), "routed": Kernel(), "routed, wider": Kernel(beta=0.4)}
ROUTED = "training rows for centroids, the test row's embedding"


def measured(suite: Suite, folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each way to merge."""
    adapters = extract_adapters(suite, folder, given.rank)
    tests = {task.expert: rows_of(suite, task, "test", given.limit) for task in suite.tasks}
    models = {task.expert: suite.domain.load(suite.experts(0).folder(task)).eval() for task in suite.tasks}
    place = suite.experts(0).base
    base = type(next(iter(models.values())).base_model).from_pretrained(place, add_pooling_layer=False).eval()
    centroids = {}
    for task in suite.tasks:
        rows = rows_of(suite, task, "train", given.centroid_rows)
        centroids[task.expert] = centroid_of(torch.stack([embed(base, batch) for batch, _ in rows])).float()
    save_file(centroids, folder / "centroids.safetensors")
    queries = {task: [embed(base, batch) for batch, _ in rows] for task, rows in tests.items()}
    routed = {}
    for name, kernel in KERNELS.items():
        index = folder / f"{name}.route"
        write_index(list(map(str, adapters.values())), folder / "centroids.safetensors", index, base=str(place), kernel=kernel)
        routed[name] = acemerge.load_routed(index, model=base, cache=8)
    for model in models.values():  # one backbone for all, whose weights are merged in place
        setattr(model, model.base_model_prefix, base)
    equal = dict.fromkeys(adapters, 1 / len(adapters))
    ways: dict[str, tuple[str, Weights]] = {
        "base": ("no adapter", lambda task, row: {}),  # noqa: ARG005
        "own adapter": ("the task of the row", lambda task, row: {task: 1.0}),  # noqa: ARG005
        "average": ("weights alone", lambda task, row: equal),  # noqa: ARG005
    }
    for name in KERNELS:
        ways[name] = (ROUTED, lambda task, row, name=name: routed[name].weights(queries[task][row]))
    for name, (uses, weights) in ways.items():
        started = time.monotonic()
        scores = share_right(suite, models, tests, lambda task, row, w=weights: routed["nearest"].merge(w(task, row)))
        found = {"row": name, "uses": uses, "scores": scores, "average": sum(scores.values()) / len(scores)}
        found["seconds"] = time.monotonic() - started
        if name in KERNELS:
            each = [(task, routed[name].weights(query)) for task, own in queries.items() for query in own]
            found["adapters_per_row"] = sum(len(w) for _, w in each) / len(each)
            found["own_adapter_first"] = sum(next(iter(w), "") == task for task, w in each) / len(each)
            found["kernel"] = KERNELS[name].model_dump()
        print(f"{name}: {100 * found['average']:.1f}%, {found['seconds']:.0f} s", flush=True)
        yield found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--limit", type=int, default=40, help="test rows of each task")
    parser.add_argument("--centroid-rows", type=int, default=100, help="training rows of each task")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path("bench-output"))
    given = parser.parse_args()
    suite = get_suite(given.suite)
    suite.prepare([0], print)
    folder = given.folder / f"route-{suite.name}"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"suite": suite.name, "seed": 0, "test_rows_per_task": given.limit, "centroid_rows": given.centroid_rows}
    about |= {"rank": given.rank}
    rows = list(measured(suite, folder, given))
    (folder / "route.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
