"""Adapters merged for each test row by how near it is to their tasks' rows, beside fixed merges of the same adapters.

    python benchmarks/route_suite.py text-8 --limit 40

Adapters are extracted from the suite's experts of seed 0. A row's embedding is the base's own, the mean over its tokens; a
centroid is that of training rows. Every row is answered under its own task's head, as in all tables of the suite; the task itself
is not used for the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import acemerge
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.routing.index import Kernel, write_index
from acemerge.routing.model import RoutedModel
from acemerge.routing.weights import centroid_of

Rows = list[tuple[dict[str, Tensor], int]]
"""Each row as the model takes it, and its class."""
Weights = dict[str, list[dict[str, float]]]
"""By task, every row's."""
Scores = dict[str, float]


def rows_of(suite: Suite, task: Any, part: str, count: int) -> Rows:
    """One by one."""
    split = getattr(task.load(), part).first(count)
    prepared = suite.domain.prepare(split)
    labels = torch.as_tensor(split.labels).tolist()
    return [(prepared.batch(torch.tensor([i])), int(labels[i])) for i in range(len(prepared.lengths))]


def embed(backbone: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the base's last states."""
    with torch.inference_mode():
        states: Tensor = backbone(**batch).last_hidden_state[0]
    return states[batch["attention_mask"][0].bool()].mean(0) if "attention_mask" in batch else states.mean(0)


def extract_adapters(suite: Suite, folder: Path, rank: int) -> dict[str, Path]:
    """Of every expert, once."""
    found = {}
    for name, expert in suite.folders(0).items():
        found[name] = folder / "adapters" / name
        if not found[name].is_dir():
            acemerge.extract(suite.experts(0).base, expert, found[name], rank=rank, quiet=True)
    return found


def share_right(suite: Suite, models: dict[str, Any], tests: dict[str, Rows], routed: RoutedModel, weights: Weights) -> Scores:
    """Of every task, the rows that are answered right with each row's weights."""
    scores = {}
    for task, rows in tests.items():
        right = 0
        for (batch, label), own in zip(rows, weights[task], strict=True):
            routed.merge(own)
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
    models: dict[str, Any] = {task.expert: suite.domain.load(suite.experts(0).folder(task)).eval() for task in suite.tasks}
    place, some = suite.experts(0).base, next(iter(models.values()))
    base = type(some.base_model).from_pretrained(place, add_pooling_layer=False).eval()
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
        setattr(model, some.base_model_prefix, base)
    equal = dict.fromkeys(adapters, 1 / len(adapters))
    ways: dict[str, tuple[str, Weights]] = {
        "base": ("no adapter", {task: [{}] * len(own) for task, own in queries.items()}),
        "own adapter": ("the task of the row", {task: [{task: 1.0}] * len(own) for task, own in queries.items()}),
        "average": ("weights alone", {task: [equal] * len(own) for task, own in queries.items()}),
    }
    for name, model in routed.items():
        ways[name] = (ROUTED, {task: [model.weights(query) for query in own] for task, own in queries.items()})
    for name, (uses, weights) in ways.items():
        started = time.monotonic()
        scores = share_right(suite, models, tests, routed["nearest"], weights)
        average = statistics.fmean(scores.values())
        print(f"{name}: {100 * average:.1f}%, {time.monotonic() - started:.0f} s", flush=True)
        yield {"row": name, "uses": uses, "scores": scores, "average": average, **_about_weights(name, weights)}


def _about_weights(name: str, weights: Weights) -> dict[str, Any]:
    """How many adapters count for a row, and how often the row's own task is the first."""
    if name not in KERNELS:
        return {}
    each = [(task, own) for task, rows in weights.items() for own in rows]
    return {
        "adapters_per_row": statistics.fmean(len(own) for _, own in each),
        "own_adapter_first": statistics.fmean(next(iter(own), "") == task for task, own in each),
        "kernel": KERNELS[name].model_dump(),
    }


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
