"""Fisher merging: every entry weighted by how much the expert's answers depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.expert_weights import NonNegativeWeights, check_count, split_text, weight_each
from acemerge.methods.registry import Context, Options, method

Scales = Annotated[
    Literal["equal"] | tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    BeforeValidator(split_text),
    Field(description="one per expert: it is measured and averaged at theta_0 + scale * tau_t; 'equal': 1 each, where it is"),
]


@dataclass(frozen=True)
class FisherOptions(Options):
    """The exact diagonal of the Fisher information, every expert's scaled to the same length over the whole model."""

    form: Annotated[
        Literal["exact", "sampled", "summed_gradient"],
        Field(
            description="exact: every row and class by itself; sampled: one class per answer, drawn from the expert's own "
            "distribution; summed_gradient: the square of a sum over 16 rows, as other libraries have it, which is no Fisher"
        ),
    ] = "exact"
    normalise: Annotated[bool, Field(description="divide every expert's information by its length over the whole model")] = True
    floor: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="least information of an entry, the root mean square being 1")
    ] = 1e-6
    weights: NonNegativeWeights = "equal"
    scales: Scales = "equal"
    rows: Annotated[int, Field(ge=1, description="rows of every expert's data, at most")] = 256
    seed: Annotated[int, Field(ge=0, description="of the draws of form=sampled")] = 0

    def check(self, experts: int) -> None:
        """One weight and one scale per expert, and not all weights 0."""
        check_count(self.weights, experts)
        check_count(self.scales, experts, "scales")
        if self.weights != "equal" and not any(self.weights):
            raise InputError(f"method 'fisher': weights={list(self.weights)} are all 0; give at least one expert a weight")


class HasInformation(Protocol):
    """What the kernel needs to know."""

    def of(self, expert: str, tensor: str) -> Tensor | None:
        """F_t as the file stores the tensor; None for a tensor that no answer depends on."""

    def scale(self, expert: str) -> float:
        """By which it is multiplied."""


def merge_by_information(
    task_vectors: Float[Tensor, "task *shape"],
    information: Sequence[Tensor | None],
    weights: Sequence[float],
    floor: float,
    scales: Sequence[float] | None = None,
) -> Float[Tensor, "*shape"]:
    """M = sum_t c_t F_t s_t tau_t / sum_t c_t F_t, entry by entry, no F_t being smaller than the floor; by default s_t = 1."""
    pulled = torch.zeros(task_vectors.shape[1:], dtype=torch.float64, device=task_vectors.device)
    total = torch.zeros_like(pulled)
    for task_vector, found, weight, scale in zip(task_vectors, information, weights, scales or [1.0] * len(weights), strict=True):
        F = torch.zeros_like(pulled) if found is None else found.to(pulled)
        F = F.clamp_min(floor).mul_(weight)
        total += F
        pulled.addcmul_(F, task_vector.double(), value=scale)
    return pulled / total


@method(
    "fisher",
    title="Fisher merging",
    paper="Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022",
    touches="all",
    ordered=True,
    uses="data",
    flops=lambda tasks, rows, columns: 6.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 5.0 * rows * columns,  # noqa: ARG005
    measured_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
)
def fisher(task_vectors: Float[Tensor, "task *shape"], options: FisherOptions, context: Context) -> Float[Tensor, "*shape"]:
    """Uses data. The experts' average, every entry weighted by how much the expert's answers depend on it.

    theta = sum_t c_t F_t theta_t / sum_t c_t F_t, with F_t the diagonal of expert t's Fisher information: the mean over rows of
    sum_y p(y|x) (d log p(y|x) / d theta)^2. Labels are not needed: y runs over the expert's own answers. Dynamic Fisher-weighted
    merging is a search over `scales`.
    """
    measured: HasInformation = context.statistics
    weights = weight_each(options.weights, context.experts, context.tensor)
    information = []
    for expert in context.experts:
        found = measured.of(expert, context.tensor)
        information.append(context.to_method(found) * measured.scale(expert) if found is not None else None)
    scales = weight_each(options.scales, context.experts, context.tensor, "scales")
    return merge_by_information(task_vectors, information, weights, options.floor, scales)
