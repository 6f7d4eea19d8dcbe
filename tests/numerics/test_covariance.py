"""Weighted covariances of experts, whole or block by block, by either route."""

import pytest
import torch

from acemerge.numerics import linalg
from acemerge.numerics.covariance import Experts
from acemerge.numerics.frame import standard_frame
from spectral_cases import every_shape, experts
from spectral_references import closed_form


@pytest.mark.parametrize("route", ["lapack", "torch"])
@pytest.mark.parametrize("blocks", [2**20, 15])
@every_shape
def test_covariances_of_experts_as_they_are(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], route: str, blocks: int
) -> None:
    monkeypatch.setattr(linalg, "uses_lapack", lambda tensor: route == "lapack")
    monkeypatch.setattr(linalg, "_BLOCK_ELEMENTS", blocks)
    task_vectors, weights = experts(3, *shape), [0.5, 2.0]
    chosen = task_vectors[[0, 2]]
    S, CS = Experts(task_vectors, [0, 2], standard_frame(task_vectors), centre=False).weighted_covariance(weights)
    G = [w * delta.T @ delta for w, delta in zip(weights, chosen, strict=True)]
    identity = torch.eye(shape[1], dtype=torch.float64)
    torch.testing.assert_close(S.times(identity), G[0] + G[1])
    torch.testing.assert_close(CS, chosen[0] @ G[0] + chosen[1] @ G[1])
    merged, rank = Experts(task_vectors, [0, 2], standard_frame(task_vectors), centre=False).least_squares(weights, 1e-9)
    torch.testing.assert_close(merged, torch.from_numpy(closed_form(chosen.numpy(), weights, 1e-9)))
    assert rank == min(shape[1], 2 * shape[0])
