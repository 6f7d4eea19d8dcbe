"""Spectra of the experts' changes, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.stats

from acemerge.diagnosis.spectra import measure_spectra
from random_tasks import random_tasks


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_spectra_agree_with_numpy(shape: tuple[int, int]) -> None:
    tasks, P, M = random_tasks(2, *shape), random_tasks(*shape, seed=3), random_tasks(*shape, seed=4)
    found = measure_spectra(tasks, P, M, shape)
    U, s, Vt = np.linalg.svd(P.numpy(), full_matrices=False)
    U2, s2, Vt2 = np.linalg.svd(M.numpy(), full_matrices=False)
    k = 2  # 5% of 40
    assert found.plain.values[0] == pytest.approx(s[0])
    assert found.plain.values[-1] == pytest.approx(s[-1], rel=1e-6)
    assert found.plain.leading_energy == pytest.approx((s[:k] ** 2).sum() / (s**2).sum())
    assert found.merged.stable_rank == pytest.approx((s2**2).sum() / s2[0] ** 2)
    assert found.leading_cosine == pytest.approx(min(abs(U[:, 0] @ U2[:, 0]), abs(Vt[0] @ Vt2[0])))
    rights = [np.linalg.svd(D.numpy())[2][:k] for D in tasks]
    angles = scipy.linalg.subspace_angles(rights[0].T, rights[1].T)
    assert found.overlap[0][1] == pytest.approx((np.cos(angles) ** 2).mean())
    assert found.overlap[0][0] == pytest.approx(1)
    assert found.chance == k / shape[1]
    energy = np.linalg.svd(tasks[0].numpy(), compute_uv=False) ** 2
    assert found.leading_energies[0] == pytest.approx(energy[:k].sum() / energy.sum())
