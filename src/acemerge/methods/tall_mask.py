"""TALL masks: one vector for all tasks, and per task the entries of it that the task needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, masks_elements, method
from acemerge.methods.ties import TiesOptions, TiesStatistics, elect_and_merge
from acemerge.numerics.linalg import weighted_sum


@dataclass(frozen=True)
class TallMaskOptions(Options):
    """Without validation data to choose them: mask_lambda from the middle of the paper's grid, and task arithmetic's scale."""

    mask_lambda: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="an entry is a task's own when |tau_t| > mask_lambda |tau_M - tau_t|")
    ] = 0.4
    merge: Annotated[
        Literal["sum", "ties"], Field(description="tau_M: the sum of the task vectors, or TIES with the sum of what agrees")
    ] = "sum"
    keep: Annotated[float, Field(gt=0, le=1, description="with merge=ties: share of largest entries that TIES keeps")] = 0.2
    alpha: Annotated[
        float,
        Field(allow_inf_nan=False, description="scale of the shared model, W0 + alpha * tau_M; the tasks' models have none"),
    ] = 0.3


def ties_statistics(options: TallMaskOptions, experts: tuple[str, ...]) -> TiesStatistics | None:  # noqa: ARG001
    """The whole model's thresholds and signs where tau_M is TIES; a sum needs none."""
    return TiesStatistics(TiesOptions(keep=options.keep, merge="sum")) if options.merge == "ties" else None


def multi_task_vector(
    task_vectors: Float[Tensor, "task *shape"], options: TallMaskOptions, context: Context
) -> Float[Tensor, "*shape"]:
    """tau_M in float64: a float32 sum would decide entries at the masks' edge by the order of the experts."""
    if options.merge == "sum":
        return weighted_sum(task_vectors, [1.0] * len(task_vectors))
    statistics: TiesStatistics = context.statistics
    return elect_and_merge(statistics.trim(task_vectors, context), "sum", statistics.majority_sign)


def tall_masks(
    task_vectors: Float[Tensor, "task *shape"], tau_M: Float[Tensor, "*shape"], mask_lambda: float
) -> Iterator[Bool[Tensor, "*shape"]]:
    """m_t = 1{|tau_t| > lambda |tau_M - tau_t|}, strict as in the authors' code, one task at a time."""
    for tau in task_vectors:
        yield tau.abs() > (tau_M - tau).abs_().mul_(mask_lambda)


@method(
    "tall_mask",
    title="TALL masks",
    paper="Wang et al., Localizing Task Information for Improved Model Merging and Compression, ICML 2024",
    touches="all",
    statistics=ties_statistics,
    per_task=True,
    facts={"mask_share": "share of entries that a task's mask keeps, on average"},
    flops=lambda tasks, rows, columns: 6.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (3.0 + tasks / 8) * rows * columns,
    parts_elements=masks_elements,
)
def tall_mask(task_vectors: Float[Tensor, "task *shape"], options: TallMaskOptions, context: Context) -> Merged:
    """ONE MODEL PER TASK, not one merged model: W0 + m_t o tau_M, the sum of the task vectors under a 1-bit mask per task.

    tau_M = sum_t tau_t, and m_t = 1{|tau_t| > lambda |tau_M - tau_t|} keeps the entries that task t cares about. Stores one
    vector for all tasks and one bit per entry and task. The model at the output's root is the shared one, task arithmetic with
    alpha; `acemerge task` makes a task's model. Compare it with other one-model-per-task methods only.
    """
    tau_M = multi_task_vector(task_vectors, options, context)
    masks = list(tall_masks(task_vectors, tau_M, options.mask_lambda))
    one = torch.ones((), dtype=torch.float64)
    share = float(torch.stack([mask.double().mean() for mask in masks]).mean())
    return Merged(tau_M, {"mask_share": share}, parts=[{"mask": mask, "scale": one} for mask in masks], shared=tau_M)
