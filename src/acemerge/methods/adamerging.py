"""AdaMerging: one coefficient per expert, or per expert and tensor, learnt so that the merged model is sure of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import weighted_sum


@dataclass(frozen=True)
class AdaMergingOptions(Options):
    """The authors' defaults. Their two batches of 16 for a step are one of 32, which gives the same direction."""

    granularity: Annotated[
        Literal["layer", "task"],
        Field(description="layer: a coefficient for every expert and tensor; task: one for every expert"),
    ] = "layer"
    start: Annotated[float, Field(ge=0, le=1, description="of every coefficient; a tensor that never matters keeps it")] = 0.3
    plus_plus: Annotated[
        bool, Field(description="AdaMerging++: only entries of the task vectors that TIES would trim to and elect take part")
    ] = False
    keep: Annotated[float, Field(gt=0, le=1, description="plus_plus: share of largest entries kept, as TIES' keep")] = 0.2
    clamp: Annotated[bool, Field(description="use the coefficients cut to what lies between 0 and 1")] = True
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="of Adam")] = 1e-3
    steps: Annotated[int, Field(ge=0, description="of Adam; with 0 it is task arithmetic with the start")] = 500
    batch_size: Annotated[int, Field(ge=1, description="rows of every task in a step")] = 32
    rows: Annotated[int, Field(ge=1, description="rows of every expert's data that batches are drawn from, at most")] = 1000
    seed: Annotated[int, Field(ge=0, description="of the drawing of batches")] = 0


class HasCoefficients(Protocol):
    """What the kernel needs to know."""

    def coefficient(self, expert: str, tensor: str) -> float:
        """lambda_t of this tensor."""

    def of_task_vectors(self, task_vectors: Tensor, context: Context) -> Tensor:
        """What the coefficients are for: the task vectors, or what was elected of them."""


@method(
    "adamerging",
    title="AdaMerging",
    paper="Yang et al., AdaMerging: adaptive model merging for multi-task learning, ICLR 2024",
    touches="all",
    uses="data",
    test_rows=True,
    facts={"coefficient of {expert}": "what {expert}'s change was multiplied by"},
    flops=lambda tasks, rows, columns: 2.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
    measured_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
)
def adamerging(task_vectors: Float[Tensor, "task *shape"], options: AdaMergingOptions, context: Context) -> Merged:  # noqa: ARG001
    """Uses data. Task arithmetic whose coefficients are learnt: the merged model is to be sure of its answers.

    theta^j = theta_0^j + sum_t lambda_{t,j} tau_t^j for every tensor j, or one lambda_t for all. Adam minimises the entropy of
    the answers on unlabelled rows of every task, under the experts' own heads. With plus_plus, AdaMerging++, tau_t is first cut
    to what TIES would elect of it.
    """
    measured: HasCoefficients = context.statistics
    coefficients = [measured.coefficient(expert, context.tensor) for expert in context.experts]
    facts = {f"coefficient of {expert}": value for expert, value in zip(context.experts, coefficients, strict=True)}
    return Merged(weighted_sum(measured.of_task_vectors(task_vectors, context), coefficients), facts)
