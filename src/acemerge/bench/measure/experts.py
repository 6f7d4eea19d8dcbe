"""Experts: the base, fine-tuned once per task and seed, kept in the cache as ordinary folders.

A folder appears when its expert is complete, so an interrupted training goes on with the next one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from acemerge.bench.data.task import Task, TrainedTask
from acemerge.bench.domains.domain import Domain, Prepared, TrainableDomain, is_of_head
from acemerge.bench.measure.side_by_side import WORKERS, run_side_by_side
from acemerge.cache import cache_folder
from acemerge.calibration.next_tokens import mean_next_token_loss
from acemerge.output.whole_files import replace_folder

HEAD_LEARNING_RATE = 1e-3
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; it then falls to zero."""
TRAINED = "training.json"
"""In each expert's folder: how it was trained."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Experts:
    """Where one domain's base and experts of one seed are."""

    domain: Domain
    seed: int

    @property
    def base(self) -> Path:
        """The base's folder."""
        return cache_folder() / "models" / self.domain.name / "base"

    def folder(self, task: Task) -> Path:
        """One expert's folder. It is called as its task, which names the expert in a merge."""
        return cache_folder() / "models" / self.domain.name / f"seed-{self.seed}" / task.name

    def identity(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """How these tasks' experts were trained: what is trained alike is the same."""
        records = [json.loads((self.folder(task) / TRAINED).read_text(encoding="utf-8")) for task in tasks]
        return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def prepare_experts(
    domain: TrainableDomain, tasks: Sequence[TrainedTask], seeds: Sequence[int], say: Say, workers: int = WORKERS
) -> None:
    """Write the base and train every expert that is not there yet."""
    base = Experts(domain, 0).base
    if not base.is_dir():
        say(f"{domain.name}: fetching the base")
        with replace_folder(base) as staging:
            domain.write_base(staging)
    left = [(task, seed) for seed in seeds for task in tasks if not _is_trained(domain, task, seed)]
    if not left:
        return
    say(f"{domain.name}: training {len(left)} experts, two at a time; what is complete is kept if you interrupt this")
    started = time.monotonic()
    calls = run_side_by_side(train_expert, [(domain, task, seed) for task, seed in left], workers)
    for done, (index, record) in enumerate(calls, 1):
        task, seed = left[index]
        say(
            f"{done}/{len(left)} {task.name} (seed {seed}): loss {record['last_loss']:.2f}, {record['seconds']:.0f} s; "
            f"{time.monotonic() - started:.0f} s so far"
        )


def _settings(domain: TrainableDomain, task: TrainedTask, seed: int) -> dict[str, Any]:
    return {
        "task": task.name,
        "source": task.source,
        "seed": seed,
        "train_rows": task.train_rows,
        "epochs": task.epochs,
        "batch_size": task.batch_size,
        "learning_rate": task.learning_rate,
        "head_learning_rate": HEAD_LEARNING_RATE,
        **domain.training,
    }


def _is_trained(domain: TrainableDomain, task: TrainedTask, seed: int) -> bool:
    """Whether the expert is there and was trained with these settings."""
    record = Experts(domain, seed).folder(task) / TRAINED
    return record.is_file() and _settings(domain, task, seed).items() <= json.loads(record.read_text()).items()


def train_expert(domain: TrainableDomain, task: TrainedTask, seed: int) -> dict[str, Any]:
    """Fine-tune what the domain makes of the base for the task, and save the folder. Deterministic by seed, for one thread."""
    started = time.monotonic()
    experts = Experts(domain, seed)
    rows = domain.prepare(task.load().train.first(task.train_rows))
    torch.manual_seed(seed)
    model = domain.new_expert(experts.base, task).train()
    losses = fine_tune(domain, model, rows, task, seed)
    record = {
        **_settings(domain, task, seed),
        "steps": len(losses),
        "last_loss": sum(losses[-20:]) / len(losses[-20:]),
        "seconds": round(time.monotonic() - started, 1),
    }
    with replace_folder(experts.folder(task)) as staging:
        domain.save(model.eval(), staging)
        (staging / TRAINED).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def fine_tune(domain: Domain, model: nn.Module, rows: Prepared, task: TrainedTask, seed: int) -> list[float]:
    """AdamW with warm-up and linear decay; returns the loss of every step."""
    generator = torch.Generator().manual_seed(seed)
    batches = [batch for _ in range(task.epochs) for batch in shuffled_batches(rows.lengths, task.batch_size, generator)]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in named if not is_of_head(name)], "lr": task.learning_rate},
            {"params": [p for name, p in named if is_of_head(name)], "lr": HEAD_LEARNING_RATE},
        ],
        weight_decay=0.01,
        fused=True,
    )
    rising = max(1, round(WARM_UP * len(batches)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (len(batches) - step) / max(1, len(batches) - rising))
    )
    losses = []
    for indices in batches:
        batch = rows.batch(indices)
        loss = _loss(domain.logits(model, batch), batch, rows.labels[indices])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def _loss(logits: Tensor, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
    """A model that answers for every token learns to expect the next one; others learn the labels."""
    return mean_next_token_loss(logits, batch) if logits.dim() == 3 else functional.cross_entropy(logits, labels)


def shuffled_batches(lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """One pass over all rows in random order, but rows of like length together where they are near: padding costs as much."""
    batches: list[Tensor] = []
    for near in torch.split(torch.randperm(len(lengths), generator=generator), 20 * size):
        batches += torch.split(near[lengths[near].argsort(stable=True)], size)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
