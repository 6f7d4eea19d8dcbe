"""Model Stock: the experts' mean, brought towards the base as far as their angles say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Merged, Options, method
from acemerge.numerics.vectors import inner_products, lengths_and_cosines, tensor_of, vectors_of, weighted_vectors

SINGULAR = 1e-6  # of 1 + (T - 1) cos: experts that cancel, of which there is no best point between base and mean


@dataclass(frozen=True)
class ModelStockOptions(Options):
    """The ratio is found, not set."""

    scope: Annotated[
        Literal["tensor", "row"], Field(description="one ratio for the whole tensor (layer-wise), or one per row (filter-wise)")
    ] = "tensor"


@method(
    "model_stock",
    title="Model Stock",
    paper="Jang, Yun and Han, Model Stock: All we need is just a few fine-tuned models, ECCV 2024",
    touches="all",
    low_rank=lambda options: "both" if options.scope == "tensor" else None,
    facts={
        "cosine": "between two experts' changes, the mean over all pairs",
        "ratio": "t: where the result lies between base (0) and the experts' mean (1)",
    },
    flops=lambda tasks, rows, columns: (2.0 * tasks + 4.0) * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
)
def model_stock(task_vectors: Float[Tensor, "task *shape"], options: ModelStockOptions) -> Merged:
    """The experts' mean, as near to the base as their angles say: M = t mean_t tau_t, on every floating-point tensor.

    t = T cos / (1 + (T - 1) cos), cos being the mean cosine between two task vectors: 1 if all experts agree, 0 if their changes
    are orthogonal. For fine-tunes of one base on the same or a similar task.
    """
    vectors, experts = vectors_of(task_vectors, options.scope), len(task_vectors)
    if experts == 1:
        warning = "there is one expert, and no angle between two: it is taken as it is"
        return Merged(task_vectors[0].clone(), {"ratio": 1.0}, (warning,))
    cosine = mean_cosine(inner_products(vectors))
    t = ratio(cosine, experts)
    M = weighted_vectors(vectors, (t / experts)[:, None].expand(-1, experts))
    facts = {"cosine": float(cosine.mean()), "ratio": float(t.mean())} if len(t) else {}
    return Merged(tensor_of(M, task_vectors.shape[1:], options.scope), facts)


def mean_cosine(products: Float[Tensor, "m task task"]) -> Float[Tensor, " m"]:
    """The mean over pairs of different experts."""
    _, cosines = lengths_and_cosines(products)
    experts = cosines.shape[1]
    first, second = torch.triu_indices(experts, experts, offset=1)
    return cosines[:, first, second].mean(1)


def ratio(cosine: Float[Tensor, " m"], experts: int) -> Float[Tensor, " m"]:
    """t = T cos / (1 + (T - 1) cos); 0 where the experts' mean vanishes."""
    denominator = 1 + (experts - 1) * cosine
    singular = denominator.abs() < SINGULAR
    return torch.where(singular, 0.0, experts * cosine / denominator.masked_fill(singular, 1.0))
