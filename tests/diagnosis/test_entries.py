"""Entries of the experts' changes, against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from acemerge.diagnosis.entries import BINS, REACH, Entries, distance_from_normal, read_entries
from acemerge.diagnosis.measure import Diagnosis
from random_tasks import low_rank, random_tasks


def test_entries_agree_with_numpy_and_scipy() -> None:
    tasks = random_tasks(3, 40, 50) ** 3  # far from normal
    tasks[1, :20] = 0
    base = random_tasks(40, 50, seed=9)
    found = read_entries(tasks, None, base)
    flat, W0 = tasks.reshape(3, -1).numpy(), base.reshape(-1).numpy()
    np.testing.assert_allclose(found.inner, flat @ flat.T)
    np.testing.assert_allclose(found.mean, flat.mean(1), atol=1e-12)
    np.testing.assert_allclose(found.deviation, flat.std(1))
    np.testing.assert_allclose(found.skewness, scipy.stats.skew(flat, 1), rtol=1e-8)
    np.testing.assert_allclose(found.excess_kurtosis, scipy.stats.kurtosis(flat, 1), rtol=1e-8)
    for s in range(3):
        for t in range(3):
            both = (flat[s] != 0) & (flat[t] != 0)
            assert found.signs_shared[s][t] == both.sum()
            assert found.signs_opposed[s][t] == (both & (np.sign(flat[s]) != np.sign(flat[t]))).sum()
        counts, _ = np.histogram(np.clip(flat[s] / np.sqrt((flat[s] ** 2).mean()), -REACH, REACH), BINS, (-REACH, REACH))
        assert np.abs(np.array(found.histogram[s]) - counts).sum() <= 2  # float32 may put one on the other side of an edge
        cosine = np.dot(W0, W0 + flat[s]) / np.linalg.norm(W0) / np.linalg.norm(W0 + flat[s])
        assert found.base_cosine[s] == pytest.approx(cosine)


def test_entries_of_low_rank_experts_are_those_of_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acemerge.numerics.linalg._BLOCK_ELEMENTS", 200)  # several blocks
    dense, frame, cores = low_rank(3, 20, 30, 2)
    base = random_tasks(20, 30, seed=5)
    expected, found = read_entries(dense, None, base), read_entries(cores, frame, base)
    for name in ("inner", "mean", "deviation", "skewness", "excess_kurtosis", "base_inner", "base_energy"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12, err_msg=name)
    assert found.signs_opposed == expected.signs_opposed
    assert found.histogram == expected.histogram


def test_distance_from_the_normal_distribution() -> None:
    normal = read_entries(random_tasks(1, 300, 300), None, torch.ones(300, 300))
    assert normal.normal_distance[0] is not None
    assert normal.normal_distance[0] < 0.01
    uniform = torch.rand(1, 300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    found = read_entries(uniform, None, torch.ones(300, 300)).normal_distance[0]
    scaled = (uniform / uniform.square().mean().sqrt()).flatten().numpy()
    assert found == pytest.approx(scipy.stats.kstest(scaled, "norm").statistic, abs=0.005)
    assert distance_from_normal([0] * BINS) is None


def test_an_expert_that_changed_nothing_has_no_distribution() -> None:
    found = read_entries(torch.zeros(1, 4, 4), None, torch.ones(4, 4))
    assert (found.energies, found.normal_distance, found.base_cosine) == ([0.0], [None], [1.0])
    assert (found.skewness, found.excess_kurtosis) == ([0.0], [0.0])


def test_entries_are_plain_values(diagnosis: Diagnosis) -> None:
    import json

    assert json.loads(json.dumps(diagnosis.to_json()))["experts"] == list(diagnosis.experts)
    assert isinstance(diagnosis.tensors[0].entries, Entries)
