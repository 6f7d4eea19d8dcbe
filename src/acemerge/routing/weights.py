"""How much each adapter counts for a query: by how near the query's embedding is to the adapter's centroid."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def centroid_of(embeddings: Float[Tensor, "row size"]) -> Float[Tensor, " size"]:
    """What stands for the rows that an adapter was trained on: the mean of their directions, of length 1.

    >>> centroid_of(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    tensor([0.7071, 0.7071], dtype=torch.float64)
    """
    return direction(direction(embeddings).mean(0))


def direction(vectors: Float[Tensor, "*row size"]) -> Float[Tensor, "*row size"]:
    """Each vector at length 1; zeros stay."""
    return torch.nn.functional.normalize(vectors.double(), dim=-1, eps=1e-300)


def sparse_weights(
    query: Float[Tensor, " size"], centroids: Float[Tensor, "adapter size"], beta: float, tau: float, top: int
) -> Float[Tensor, " adapter"]:
    """w_k = exp(-(1 - cos(query, centroid_k)) / beta^2), with sum 1; then only those above tau, at most `top`, with sum 1 again.

    All 0 where none is above tau: the base alone. Where several are equally near, the first ones count.

    >>> sparse_weights(torch.tensor([1.0, 0.2]), torch.eye(2), beta=0.5, tau=0.01, top=2)
    tensor([0.9584, 0.0416], dtype=torch.float64)
    """
    cosines = direction(centroids) @ direction(query)
    weights = (cosines / beta**2).softmax(0)  # exp(-1 / beta^2) is common to all
    order = weights.argsort(descending=True, stable=True)
    chosen = torch.zeros_like(weights, dtype=torch.bool)
    chosen[order[:top]] = True
    kept = torch.where(chosen & (weights > tau), weights, 0.0)
    total = kept.sum()
    return kept / total if total > 0 else kept
