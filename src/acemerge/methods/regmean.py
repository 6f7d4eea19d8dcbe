"""RegMean: the linear layers that come nearest to every expert's answers on the expert's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import cholesky_solver

RIDGE = 1e-6
"""Of the mean of all H_t's diagonals, added to every H_t: what no input has ever shown is averaged."""

Rows = Annotated[int, Field(ge=1, description="rows of every expert's data that its model is run on, at most")]
OffDiagonal = Annotated[
    float, Field(ge=0, le=1, description="a: what is left of the Gram matrices beside their diagonal; 1 all of it, 0 nothing")
]


@dataclass(frozen=True)
class RegMeanOptions(Options):
    """The paper's default a, and the number of rows that other libraries use."""

    off_diagonal: OffDiagonal = 0.9
    rows: Rows = 256


class HasGrams(Protocol):
    """What the kernel needs to know."""

    def of(self, expert: str, tensor: str) -> Tensor | None:
        """G_t of a layer; None if no input ever came to it."""


def shrink_off_diagonal(gram: Float[Tensor, "n n"], share: float) -> Float[Tensor, "n n"]:
    """H = a G + (1 - a) diag(G)."""
    shrunk = gram * share
    shrunk.diagonal().copy_(gram.diagonal())
    return shrunk


def merge_under_grams(
    task_vectors: Float[Tensor, "task out in"], grams: Sequence[Tensor | None], off_diagonal: float
) -> Float[Tensor, "out in"]:
    """M = (sum_t tau_t H_t)(sum_t H_t)^-1, so that W0 + M minimises sum_t tr (W - W_t) H_t (W - W_t)^T."""
    n = task_vectors.shape[2]
    mean_diagonal = sum(float(gram.diagonal().mean()) for gram in grams if gram is not None) / len(grams)
    ridge = RIDGE * mean_diagonal or 1.0  # nothing seen at all: the plain mean
    total = torch.zeros(n, n, dtype=torch.float64, device=task_vectors.device)
    pulled = torch.zeros(task_vectors.shape[1:], dtype=torch.float64, device=task_vectors.device)
    for task_vector, gram in zip(task_vectors, grams, strict=True):
        wide = task_vector.double()
        pulled.add_(wide, alpha=ridge)
        if gram is not None:
            H = shrink_off_diagonal(gram.to(total), off_diagonal)
            total += H
            pulled.addmm_(wide, H)
    return cholesky_solver(total, ridge * len(grams))(pulled)


@method(
    "regmean",
    title="RegMean",
    paper="Jin et al., Dataless knowledge fusion by merging weights of language models, ICLR 2023",
    touches="linear",
    uses="data",
    flops=lambda tasks, rows, columns: columns**3 / 3 + 2.0 * (tasks + 1) * rows * columns**2,
    float64_elements=lambda tasks, rows, columns: 3.0 * columns**2 + 2.0 * rows * columns,  # noqa: ARG005
    measured_elements=lambda tasks, rows, columns: 1.0 * columns**2,  # noqa: ARG005
)
def regmean(task_vectors: Float[Tensor, "task out in"], options: RegMeanOptions, context: Context) -> Merged:
    """Uses data. Each linear layer becomes the least-squares fit to all experts' answers on their own inputs.

    W = (sum_t W_t H_t)(sum_t H_t)^-1 with H_t = a G_t + (1 - a) diag(G_t), and G_t the mean of x x^T over the inputs of that
    layer in expert t's own model. Everything that is not a linear layer's weight is averaged.
    """
    measured: HasGrams = context.statistics
    grams = [measured.of(expert, context.tensor) for expert in context.experts]
    unseen = [expert for expert, gram in zip(context.experts, grams, strict=True) if gram is None]
    warning = f"no row came to this layer in {', '.join(unseen)}" + ("; it is averaged" if len(unseen) == len(grams) else "")
    return Merged(merge_under_grams(task_vectors, grams, options.off_diagonal), warnings=(warning,) if unseen else ())
