"""MINGLE: experts cut to low rank, mixed in every layer by gates that look at the layer's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import directions_elements, directions_flops, leading_directions, weighted_sum


@dataclass(frozen=True)
class MingleOptions(Options):
    """The authors' defaults for texts; for pictures they take five rows of each class and a learning rate of 1e-4."""

    directions: Annotated[int, Field(ge=1, description="leading singular directions kept of what is new in an expert")] = 64
    subspace: Annotated[
        int, Field(ge=0, description="k: leading directions of each earlier task's inputs that a new gate is kept away from")
    ] = 3
    gamma: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="how fast that relaxes where gradients insist; 0: never")
    ] = 1.0
    beta: Annotated[float, Field(ge=0, lt=1, description="of the running mean of how much they insist")] = 0.99
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="of Adam")] = 1e-3
    steps: Annotated[int, Field(ge=0, description="of Adam, for each expert's gates; with 0 every task's model is the base")] = 50
    batch_size: Annotated[int, Field(ge=1, description="rows in a step")] = 16
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False, description="of the answers that are compared")] = 2.0
    rows: Annotated[int, Field(ge=1, description="rows of every expert's data, at most")] = 100
    seed: Annotated[int, Field(ge=0, description="of the drawing of batches")] = 0
    alpha: Annotated[
        float, Field(allow_inf_nan=False, description="scale of the shared model, the mean of the tasks' models; they have none")
    ] = 1.0


class HasGates(Protocol):
    """What the kernel needs to know."""

    def gates(self, task: str, tensor: str, experts: Sequence[str]) -> Sequence[float]:
        """What each of these experts counts for in that expert's task."""


def low_rank_experts(task_vectors: Float[Tensor, "task out in"], rank: int) -> list[Float[Tensor, "out in"]]:
    """f_t: of what is new in tau_t, beside f_1 + ... + f_(t-1), the leading singular directions."""
    earlier = torch.zeros_like(task_vectors[0], dtype=torch.float64)
    experts = []
    for tau in task_vectors:
        own = leading_directions(what_is_new(tau.double(), earlier), rank)
        experts.append((own.left * own.values) @ own.right.T)
        earlier += experts[-1]
    return experts


def what_is_new(tau: Float[Tensor, "out in"], earlier: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """tau without its coordinates in the earlier experts' leading directions, and on the diagonal of all their directions.

    With E = U diag(s) V^T and C = U^T tau V, what goes is C[:K, :K] and the diagonal of C; K = exp(entropy of s / sum s).
    """
    found = leading_directions(earlier, min(earlier.shape))
    if not len(found.values):
        return tau
    U, s, V = found.left.flip(1), found.values.flip(0), found.right.flip(1)
    K = math.floor(math.exp(float(torch.special.entr(s / s.sum()).sum())) * (1 + 1e-12))
    C = U.T @ tau @ V
    known = C.diagonal().diag()
    known[:K, :K] = C[:K, :K]
    return tau - U @ known @ V.T


@method(
    "mingle",
    title="MINGLE",
    paper="Qiu et al., MINGLE: mixture of null-space gated low-rank experts, NeurIPS 2025",
    touches="linear",
    rest="keep",
    ordered=True,
    per_task=True,
    uses="data",
    test_rows=True,
    facts={"own gate of {expert}": "what {expert}'s own low-rank change is multiplied by in its task's model"},
    flops=lambda tasks, rows, columns: (
        tasks * (directions_flops(rows, columns, 64) + directions_flops(rows, columns, min(rows, columns)))
        + (4.0 * min(rows, columns) + 4.0 * tasks) * tasks * rows * columns
    ),
    float64_elements=lambda tasks, rows, columns: (
        (2.0 * tasks + 4.0) * rows * columns + directions_elements(rows, columns, min(rows, columns))
    ),
    measured_elements=lambda tasks, rows, columns: 1.0 * tasks * rows * columns + columns * columns,
)
def mingle(task_vectors: Float[Tensor, "task out in"], options: MingleOptions, context: Context) -> Merged:
    """ONE MODEL PER TASK, not one merged model: low-rank experts, mixed in every layer by gates that are learnt (uses data).

    A task's model is W0 + sum_i g_i f_i. Experts come one after the other. Each brings f_t, what is new in its change, at low
    rank, and a gate for every linear layer, g_t(x) = w_t x + b_t, learnt on unlabelled rows of its task so that the model answers
    as the expert does; gradients are kept out of the directions that earlier tasks' inputs take. A task has its gates' mean on
    its own rows. The model at the output's root is the mean of the tasks' models.
    """
    known: HasGates = context.statistics
    experts = torch.stack(low_rank_experts(task_vectors, options.directions))
    gates = [list(known.gates(task, context.tensor, context.experts)) for task in context.experts]
    mean = weighted_sum(experts, [math.fsum(column) / len(gates) for column in zip(*gates, strict=True)])
    parts = [{"delta": weighted_sum(experts, own) - options.alpha * mean} for own in gates]
    facts = {f"own gate of {task}": own[t] for t, (task, own) in enumerate(zip(context.experts, gates, strict=True))}
    return Merged(mean, facts, parts=parts)
