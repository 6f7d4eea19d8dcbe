"""The premise of ACE on real experts: does a layer's weight change D reveal the second moment of the layer's own inputs?

For every merged matrix of every expert, D^T D is compared with the inputs that this layer really gets on held-out rows of its
task: the cosine of the two matrices. Beside it: the cosine that knowing nothing gives (the identity), and the cosine with the
inputs of the other tasks, since a merge needs what is a task's own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.bench.domains.domain import Domain, Prepared
from acemerge.bench.measure.experts import Say
from acemerge.bench.suites.plan import merged_matrices, plan_suite
from acemerge.bench.suites.registry import Suite
from acemerge.calibration.batches import batches_of_like_length


@dataclass(frozen=True)
class Alignment:
    """Of one matrix of one expert; cosines. `centred`: column means removed from D, mean removed from the inputs, as ACE does."""

    task: str
    tensor: str
    own: float
    others: float
    identity: float
    centred_own: float
    centred_others: float
    centred_identity: float


@dataclass
class InputMoments:
    """Sum of x x^T and of x over the inputs that a layer saw."""

    outer: Tensor
    total: Tensor
    count: int = 0

    def observe(self, inputs: Tensor) -> None:
        """[row, feature]."""
        wide = inputs.double()
        self.outer += wide.T @ wide
        self.total += wide.sum(0)
        self.count += len(inputs)

    @property
    def second_moment(self) -> Tensor:
        """E x x^T."""
        return self.outer / self.count

    @property
    def covariance(self) -> Tensor:
        """With the mean removed."""
        mean = self.total / self.count
        return self.second_moment - torch.outer(mean, mean)


@torch.inference_mode()
def input_moments(
    domain: Domain, model: nn.Module, rows: Prepared, weights: set[str], batch_size: int | None = None
) -> dict[str, InputMoments]:
    """By weight name, the inputs of every linear layer that holds one of these weights. Padding is no input."""
    moments: dict[str, InputMoments] = {}
    real: Tensor | None = None

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            x = x[real] if real is not None and x.shape[:2] == real.shape else x.flatten(0, -2)
            width = x.shape[-1]
            if name not in moments:
                moments[name] = InputMoments(
                    torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
                )
            moments[name].observe(x)

        return hook

    linear = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linear.items() if name in weights]
    for indices in batches_of_like_length(rows.lengths, batch_size):
        batch = rows.batch(indices)
        real = batch["attention_mask"].bool() if "attention_mask" in batch else None
        domain.logits(model.eval(), batch)
    for handle in handles:
        handle.remove()
    return moments


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two matrices as vectors."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def measure_premise(suite: Suite, seed: int, rows: int, say: Say) -> list[Alignment]:
    """Every matrix of every expert."""
    plan = plan_suite(suite, seed)
    experts = suite.experts(seed)
    merged = [t for t in plan.tensors if t.action == "merged"]
    names = [{t.name: t.experts[i].name or "" for t in merged} for i in range(len(suite.tasks))]
    moments = []
    for task, own_names in zip(suite.tasks, names, strict=True):
        held_out = suite.domain.prepare(task.load().validation.first(rows))
        model = suite.domain.load(experts.folder(task))
        moments.append(input_moments(suite.domain, model, held_out, set(own_names.values()), suite.compute.batch_size))
        say(f"{task.name}: inputs of {len(moments[-1])} layers on {len(held_out.labels)} held-out rows")
    found = []
    for planned, task_vectors in merged_matrices(plan):
        inputs = [moments[i].get(names[i][planned.name]) for i in range(len(suite.tasks))]
        if all(inputs):
            found += _alignments(planned.name, [task.name for task in suite.tasks], task_vectors.double(), inputs)
    return found


def _alignments(tensor: str, tasks: list[str], task_vectors: Tensor, inputs: list[Any]) -> list[Alignment]:
    seconds, covariances = [m.second_moment for m in inputs], [m.covariance for m in inputs]
    eye = torch.eye(task_vectors.shape[-1], dtype=torch.float64)
    found = []
    for t, (task, D) in enumerate(zip(tasks, task_vectors, strict=True)):
        C = D - D.mean(0)
        gram, centred = D.T @ D, C.T @ C
        rest = [s for s in range(len(tasks)) if s != t]
        found.append(
            Alignment(
                task,
                tensor,
                cosine(gram, seconds[t]),
                statistics.fmean(cosine(gram, seconds[s]) for s in rest),
                cosine(eye, seconds[t]),
                cosine(centred, covariances[t]),
                statistics.fmean(cosine(centred, covariances[s]) for s in rest),
                cosine(eye, covariances[t]),
            )
        )
    return found


def premise_table(alignments: list[Alignment], by: str) -> list[list[str]]:
    """Means by 'task' or by 'layer': the tensor's name without what is the same for all layers of a model."""
    groups: Mapping[str, list[Alignment]] = defaultdict(list)
    for alignment in alignments:
        groups[alignment.task if by == "task" else alignment.tensor].append(alignment)
    fields = ("own", "others", "identity", "centred_own", "centred_others", "centred_identity")
    lines = [[by, *(name.replace("_", " ") for name in fields)]]
    for name, found in groups.items():
        lines.append([name, *(f"{statistics.fmean(getattr(a, field) for a in found):.3f}" for field in fields)])
    return lines
