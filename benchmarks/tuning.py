"""How many rows of each task `merge --tune` needs: what docs/tuning.md rests on.

    python benchmarks/tuning.py measure text-8,vision-8 -o tuning-output     # every candidate on validation and on test rows
    python benchmarks/tuning.py curve tuning-output/text-8_seed0.json        # chosen by 4, 8, ... rows, judged on test rows

`measure` keeps the probability that each candidate gives to the label of each validation row, which is what `--tune` goes by,
and its accuracy on test rows. `curve` draws rows of each task at random, again and again, lets them choose, and averages what
the chosen candidate has on test rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from acemerge.bench.data.task import Task
from acemerge.bench.measure.evaluation import evaluate, prepared_rows
from acemerge.bench.measure.merging import merge_experts
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.calibration.batches import batches_of_like_length
from acemerge.output.task_models import export_expert
from acemerge.sweeps.tuning import CANDIDATES

DEFAULT = "ace_auto"
ROWS = (2, 4, 8, 16, 32, 64, 128)
DRAWS = 200
Measured = Mapping[str, Mapping[str, Mapping[str, Any]]]


def main() -> None:
    """Measure candidates, or print the curve of measured ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    measuring = verbs.add_parser("measure")
    measuring.add_argument("suites")
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--validation", type=int, default=200, help="rows of each task, at most")
    measuring.add_argument("--test", type=int, default=300, help="rows of each task, at most")
    measuring.add_argument("-o", "--output", type=Path, default=Path("tuning-output"))
    verbs.add_parser("curve").add_argument("files", nargs="+", type=Path)
    asked = parser.parse_args()
    if asked.verb == "curve":
        for file in asked.files:
            print_curve(file.stem, json.loads(file.read_text(encoding="utf-8")))
        return
    torch.set_num_threads(1)
    asked.output.mkdir(parents=True, exist_ok=True)
    for name in asked.suites.split(","):
        file = asked.output / f"{name}_seed{asked.seed}.json"
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for label, request in candidates():
            if label not in known:
                known[label] = measure(get_suite(name), asked.seed, request, asked.validation, asked.test)
                print(f"{file.stem}: {label}: {100 * mean_of(known[label]['test']):.1f}", flush=True)
                file.write_text(json.dumps(known) + "\n", encoding="utf-8")


def candidates() -> Iterator[tuple[str, dict[str, Any]]]:
    """What `--tune` tries, in its order, as `method,key=value` and as a merge is asked for it."""
    for method, values in CANDIDATES.items():
        for point in itertools.product(*values.values()):
            options = dict(zip(values, point, strict=True))
            yield ",".join([method, *(f"{name}={value}" for name, value in options.items())]), {"method": method, **options}


def measure(suite: Suite, seed: int, request: Mapping[str, Any], validation: int, test: int) -> dict[str, dict[str, Any]]:
    """Of one candidate: the probability of each validation row's label, and the share of right answers on test rows."""
    found: dict[str, dict[str, Any]] = {"validation": {}, "test": {}}
    with tempfile.TemporaryDirectory() as place:
        merged = Path(place, "merged")
        merge_experts(suite.experts(seed).base, suite.folders(seed), merged, {**suite.merge, **request})
        for task in suite.tasks:
            model = suite.domain.load(export_expert(merged, task.expert, Path(place, task.name))).eval()
            found["validation"][task.name] = probabilities(suite, task, model, validation)
            found["test"][task.name] = evaluate(suite.domain, model, prepared_rows(suite, task, "test", test), task.metric).share
    return found


@torch.inference_mode()
def probabilities(suite: Suite, task: Task, model: torch.nn.Module, limit: int) -> list[float]:
    """That the model gives to each row's label."""
    rows = prepared_rows(suite, task, "validation", limit)
    right = torch.zeros(len(rows.labels), dtype=torch.float64)
    for indices in batches_of_like_length(rows.lengths):
        believed = suite.domain.logits(model, rows.batch(indices)).double().softmax(1)
        right[indices] = believed.gather(1, rows.labels[indices].long()[:, None])[:, 0]
    return [round(value, 6) for value in right.tolist()]


def print_curve(name: str, measured: Measured) -> None:
    """A line for every number of rows, and what it is compared with."""
    test = {label: 100 * mean_of(own["test"]) for label, own in measured.items()}
    whole = max(measured, key=lambda label: fmean(fmean(rows) for rows in measured[label]["validation"].values()))
    start = next(label for label in measured if label.startswith(DEFAULT))
    print(f"{name}: the default {test[start]:.1f}, averaging {test['average']:.1f}, best on test rows {max(test.values()):.1f}")
    print(f"| rows of each task | test accuracy | ± over {DRAWS} draws | below averaging | chosen most often |")
    print("|---:|---:|---:|---:|---|")
    for number in ROWS:
        chosen = [choose(measured, number, random.Random(draw)) for draw in range(DRAWS)]
        if not all(chosen):
            continue
        scores = [test[label] for label in chosen]
        below = sum(score < test["average"] for score in scores)
        most = max(dict.fromkeys(chosen), key=chosen.count)
        print(f"| {number} | {fmean(scores):.1f} | {stdev(scores):.1f} | {below} | {most} ({chosen.count(most)}) |")
    print(f"| all | {test[whole]:.1f} | | | {whole} |")


def choose(measured: Measured, number: int, drawn: random.Random) -> str:
    """The candidate that so many rows of each task like best; none if a task has not so many."""
    sizes = {task: len(rows) for task, rows in next(iter(measured.values()))["validation"].items()}
    if min(sizes.values()) < number:
        return ""
    rows = {task: drawn.sample(range(size), number) for task, size in sizes.items()}
    return max(measured, key=lambda label: _score(measured[label]["validation"], rows))


def _score(probabilities: Mapping[str, Sequence[float]], rows: Mapping[str, Sequence[int]]) -> float:
    return fmean(float(np.take(probabilities[task], own).mean()) for task, own in rows.items())


def mean_of(scores: Mapping[str, float]) -> float:
    """Over tasks."""
    return fmean(scores.values())


if __name__ == "__main__":
    main()
