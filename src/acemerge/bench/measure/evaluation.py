"""Scores of a model on a task's rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from acemerge.bench.data.task import Task
from acemerge.bench.domains.domain import Domain, Prepared
from acemerge.bench.measure.metrics import Accuracy, Estimate, Metric, score_answers
from acemerge.calibration.batches import batches_of_like_length
from acemerge.errors import AcemergeError, InputError, first_line

if TYPE_CHECKING:
    from acemerge.bench.suites.registry import Suite

Part = Literal["test", "validation"]

_SECONDS_BETWEEN_LINES = 20


@dataclass(frozen=True)
class Compute:
    """Where models are evaluated, and how much at a time."""

    device: str = "cpu"
    batch_size: int | None = None
    """Rows of a batch; by default what suits one CPU core."""
    workers: int = 2
    """Processes of one thread each that share the work; 1: all work in this process, with all its threads."""
    quiet: bool = False

    def tell(self, message: str) -> None:
        """How far long work is."""
        if not self.quiet:
            print(f"  {message}", file=sys.stderr, flush=True)

    @property
    def threads(self) -> int | None:
        """Of a merge: one where several run side by side, else all."""
        return 1 if self.workers > 1 else None


HERE = Compute()


@torch.inference_mode()
def evaluate(
    domain: Domain, model: nn.Module, rows: Prepared, metric: Metric = "accuracy", compute: Compute = HERE, name: str = ""
) -> Accuracy | Estimate:
    """The metric of the model's answers; a regression's answer is its one number. Long work named `name` tells how far it is."""
    model.to(compute.device).eval()
    answers = torch.zeros(len(rows.labels), dtype=torch.float64)
    done, started = 0, time.monotonic()
    told = started
    for indices in batches_of_like_length(rows.lengths, compute.batch_size):
        batch = {key: value.to(compute.device) for key, value in rows.batch(indices).items()}
        logits = domain.logits(model, batch).float().cpu()
        answers[indices] = (logits[:, 0] if metric == "pearson_and_spearman" else logits.argmax(1)).double()
        done += len(indices)
        if name and time.monotonic() - told > _SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            left = (told - started) * (len(answers) - done) / done
            compute.tell(f"{name}: {done}/{len(answers)} rows, about {left:.0f} s left")
    return score_answers(metric, rows.labels.double().numpy(), answers.numpy())


Judge = Callable[["Suite", Path, Task, Part, int | None, int], Accuracy | Estimate]
"""Scores the model in a folder on a task: on a part of its rows, at most so many, among the experts of one seed."""

_prepared: dict[tuple[object, ...], Prepared] = {}


def judge_by_rows(
    suite: Suite,
    folder: Path,
    task: Task,
    part: Part,
    limit: int | None,
    seed: int,  # noqa: ARG001
) -> Accuracy | Estimate:
    """By the domain's own model and rows; the experts have no part in it."""
    rows = prepared_rows(suite, task, part, limit)
    with explained(suite, task):
        return evaluate(suite.domain, suite.domain.load(folder), rows, task.metric, suite.compute, task.name)


def prepared_rows(suite: Suite, task: Task, part: Part, limit: int | None) -> Prepared:
    """The rows, made ready once in each process."""
    key = (suite.domain.name, task.name, task.source, part, limit)
    if key not in _prepared:
        splits = task.load()
        rows = splits.test if part == "test" else splits.validation
        _prepared[key] = suite.domain.prepare(rows.first(limit))
    return _prepared[key]


@contextmanager
def explained(suite: Suite, task: Task) -> Iterator[None]:
    """What a model of another kind runs into, in words that help."""
    try:
        yield
    except (IndexError, ValueError, TypeError, KeyError, RuntimeError) as error:
        if isinstance(error, AcemergeError) or "memory" in str(error).lower():
            raise
        raise InputError(
            f"the model cannot answer the rows of {task.name} ({first_line(error)}); give a model of the same kind and "
            f"vocabulary as the base of suite {suite.name}"
        ) from error
