"""Consensus TA: task arithmetic without the entries that fewer than k tasks need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Alpha, Context, Merged, method
from acemerge.methods.tall_mask import TallMaskOptions, multi_task_vector, tall_masks, ties_statistics


@dataclass(frozen=True)
class ConsensusOptions(TallMaskOptions):
    """The paper chooses mask_lambda and alpha on validation data; these are fixed values for use without any."""

    k: Annotated[int, Field(ge=0, description="tasks that must need an entry for it to stay; 0 is task arithmetic")] = 2
    alpha: Alpha = 0.3


@method(
    "consensus_ta",
    title="Consensus Task Arithmetic",
    paper="Wang et al., Localizing Task Information for Improved Model Merging and Compression, ICML 2024",
    touches="all",
    statistics=ties_statistics,
    facts={"kept_share": "share of entries that enough experts use"},
    flops=lambda tasks, rows, columns: 6.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 4.0 * rows * columns,  # noqa: ARG005
)
def consensus_ta(task_vectors: Float[Tensor, "task *shape"], options: ConsensusOptions, context: Context) -> Merged:
    """The sum of the task vectors, only where at least k tasks need it: M = 1{sum_t m_t >= k} o sum_t tau_t.

    m_t = 1{|tau_t| > lambda |tau_M - tau_t|} is task t's TALL mask. Entries that one task alone needs interfere with the others
    and are dropped. The paper tunes lambda and alpha on validation data; without it, the defaults are fixed values.
    """
    tasks = len(task_vectors)
    k = min(options.k, tasks)
    warnings = (f"k={options.k} is more than its {tasks} expert(s): k={k} is used",) if k < options.k else ()
    tau_M = multi_task_vector(task_vectors, options, context)
    votes = torch.zeros(tau_M.shape, dtype=torch.int32, device=tau_M.device)
    for mask in tall_masks(task_vectors, tau_M, options.mask_lambda):
        votes += mask
    agreed = votes >= k
    return Merged(tau_M.mul_(agreed), {"kept_share": float(agreed.double().mean())}, warnings)
