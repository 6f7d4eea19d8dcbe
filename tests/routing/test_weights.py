"""The kernel's weights, beside a plain transcription of the formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acemerge.routing.weights import centroid_of, sparse_weights


def plain(query: Tensor, centroids: Tensor, beta: float, tau: float, top: int) -> list[float]:
    """The formula, number by number."""
    q, rows = query.tolist(), centroids.tolist()

    def cosine(row: list[float]) -> float:
        return float(sum(a * b for a, b in zip(q, row, strict=True)) / math.hypot(*q) / math.hypot(*row))

    kernel = [math.exp(-(1 - cosine(row)) / beta**2) for row in rows]
    weights = [k / sum(kernel) for k in kernel]
    largest = sorted(range(len(weights)), key=lambda k: -weights[k])[:top]
    kept = [w if w > tau and k in largest else 0.0 for k, w in enumerate(weights)]
    return [w / sum(kept) for w in kept] if sum(kept) else kept


def some(seed: int, adapters: int = 7, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((size,), (adapters, size)))  # type: ignore[return-value]


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(("tau", "top"), [(0.0, 7), (0.01, 50), (0.15, 7), (0.01, 2), (0.9, 7)])
def test_weights_are_the_formulas(beta: float, tau: float, top: int) -> None:
    for seed in range(5):
        query, centroids = some(seed)
        found = sparse_weights(query, centroids, beta, tau, top)
        torch.testing.assert_close(found.tolist(), plain(query, centroids, beta, tau, top), rtol=1e-12, atol=1e-15)


def test_sum_scale_and_order() -> None:
    query, centroids = some(0)
    found = sparse_weights(query, centroids, 0.5, 0.01, 4)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    assert int((found > 0).sum()) <= 4
    stretched = torch.tensor([[0.1], [3.0], [1.0], [7.0], [2.0], [1.0], [9.0]], dtype=torch.float64)
    torch.testing.assert_close(sparse_weights(100 * query, stretched * centroids, 0.5, 0.01, 4), found)
    turned = sparse_weights(query, centroids.flip(0), 0.5, 0.01, 4)
    torch.testing.assert_close(turned.flip(0), found)


def test_a_narrow_kernel_takes_the_nearest_and_does_not_underflow() -> None:
    query, centroids = some(1)
    found = sparse_weights(query, centroids, 1e-3, 0.01, 50)
    nearest = torch.nn.functional.cosine_similarity(query[None], centroids).argmax()
    assert found.tolist() == [1.0 if k == nearest else 0.0 for k in range(len(centroids))]


def test_where_none_is_above_tau_the_base_is_alone() -> None:
    assert not sparse_weights(torch.ones(2), torch.eye(2), beta=0.5, tau=0.5, top=2).any()


def test_a_centroid_is_the_mean_of_directions() -> None:
    rows = torch.tensor([[2.0, 0.0], [0.0, 5.0], [0.0, 0.1]])
    mean = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    torch.testing.assert_close(centroid_of(rows), mean / mean.norm())
