"""EMR-Merging: elect one vector for all tasks; per task, a mask and a scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, masks_elements, method
from acemerge.numerics.linalg import weighted_sum


@dataclass(frozen=True)
class EmrOptions(Options):
    """The paper has nothing to tune."""

    rescale: Annotated[
        Literal["global", "tensor_means"],
        Field(
            description="lambda_t from L1 norms over the whole model (the paper), or from sums of each tensor's mean magnitude"
        ),
    ] = "global"
    alpha: Annotated[
        float,
        Field(allow_inf_nan=False, description="scale of the shared model, W0 + alpha * tau_u; the tasks' models have none"),
    ] = 1.0


@dataclass(frozen=True)
class Elected:
    """The signs g and the vector tau_u = g o max_t |m_t o tau_t| that all tasks share."""

    signs: Float[Tensor, "*shape"]
    unified: Float[Tensor, "*shape"]

    def masks(self, task_vectors: Float[Tensor, "task *shape"]) -> Iterator[Bool[Tensor, "*shape"]]:
        """m_t = 1{tau_t g > 0}."""
        return (tau * self.signs > 0 for tau in task_vectors)


def elect(task_vectors: Float[Tensor, "task *shape"]) -> Elected:
    """g = +1 where sum_t tau_t > 0, else -1; the sum in float64, lest the order of the experts decide."""
    signs = (weighted_sum(task_vectors, [1.0] * len(task_vectors)) > 0).to(task_vectors.dtype).mul_(2).sub_(1)
    largest = torch.zeros_like(signs)
    for tau in task_vectors:
        torch.maximum(largest, tau * signs, out=largest)  # only where tau_t has the elected sign is it positive
    return Elected(signs, largest.mul_(signs))


class Rescales:
    """lambda_t = |tau_t|_1 / |m_t o tau_u|_1 over the whole model, or with each tensor's norms divided by its size."""

    def __init__(self, options: EmrOptions) -> None:
        self._by_means = options.rescale == "tensor_means"
        self._whole: dict[str, float] = {}
        self._masked: dict[str, float] = {}

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """Add one tensor."""
        elected = elect(task_vectors)
        magnitudes = elected.unified.abs()
        weight = 1 / max(1, magnitudes.numel()) if self._by_means else 1.0
        for expert, tau, mask in zip(context.experts, task_vectors, elected.masks(task_vectors), strict=True):
            whole = float(tau.abs().sum(dtype=torch.float64))
            masked = float((magnitudes * mask).sum(dtype=torch.float64))
            self._whole[expert] = self._whole.get(expert, 0.0) + weight * whole
            self._masked[expert] = self._masked.get(expert, 0.0) + weight * masked

    def end_pass(self) -> bool:
        """One pass is enough."""
        return False

    def of(self, experts: Sequence[str]) -> list[float]:
        """lambda_t; 0 for a task that has no entry of the elected sign, whose mask is empty."""
        return [self._whole[e] / self._masked[e] if self._masked[e] > 0 else 0.0 for e in experts]


@method(
    "emr",
    title="EMR-Merging",
    paper="Huang et al., EMR-Merging: Tuning-Free High-Performance Model Merging, NeurIPS 2024",
    touches="all",
    statistics=lambda options, experts: Rescales(options),  # noqa: ARG005
    per_task=True,
    facts={"rescale_{expert}": "what the elected vector is multiplied by in {expert}'s model"},
    flops=lambda tasks, rows, columns: 12.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (2.5 + tasks / 8) * rows * columns,
    parts_elements=masks_elements,
)
def emr(task_vectors: Float[Tensor, "task *shape"], options: EmrOptions, context: Context) -> Merged:  # noqa: ARG001
    """ONE MODEL PER TASK, not one merged model: W0 + lambda_t m_t o tau_u, one elected vector, a 1-bit mask and a scale per task.

    Elect: the sign of the sum, and the largest magnitude that has it. Mask: where the task agrees with that sign. Rescale: to the
    task vector's own L1 norm over the whole model. Stores one vector for all tasks, one bit per entry and task, and a number per
    task. The model at the output's root is the shared one, W0 + alpha tau_u; `acemerge task` makes a task's model. Compare it
    with other one-model-per-task methods only.
    """
    rescales: Rescales = context.statistics
    scales = rescales.of(context.experts)
    elected = elect(task_vectors)
    parts = []
    warnings = []
    for expert, tau, mask, scale in zip(context.experts, task_vectors, elected.masks(task_vectors), scales, strict=True):
        parts.append({"mask": mask, "scale": torch.tensor(scale, dtype=torch.float64)})
        if scale == 0 and bool(tau.any()):
            warnings.append(f"no change of '{expert}' has the elected sign anywhere: its task's model is the base")
    facts = {f"rescale_{expert}": scale for expert, scale in zip(context.experts, scales, strict=True)}
    return Merged(elected.unified, facts, tuple(warnings), parts, shared=elected.unified)
