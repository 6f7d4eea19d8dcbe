"""NearSwap against its formula, and its invariants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model
from small_models import write_models


def nearswap_reference(w0: Array, w1: Array, t: float) -> Array:
    """Towards the expert, each entry by a share of the way that is t over the distance, and at most all of it."""
    merged = np.zeros_like(w0)
    for index in np.ndindex(w0.shape):
        distance = float(abs(w1[index] - w0[index]))
        share = float(min(1.0, t / distance)) if distance else 1.0
        merged[index] = share * float(w1[index]) + (1 - share) * float(w0[index])
    return merged


@every_case
@pytest.mark.parametrize("t", [0.0, 1e-4, 0.02, 10.0])
def test_nearswap_against_its_formula(shape: tuple[int, ...], t: float, dtype: torch.dtype) -> None:
    tau = random_tasks(1, *shape, dtype=dtype)
    assert_matches(run("nearswap", tau, t=t).delta, nearswap_reference(np.zeros(shape), tau[0].double().numpy(), t), dtype)


def test_nearswap_of_a_whole_model() -> None:
    base, experts = small_model(1)
    merged = acemerge.merge_state_dicts(base, experts, method="nearswap", t=0.01)
    for name, value in merged.items():
        if value.is_floating_point():
            expected = nearswap_reference(base[name].double().numpy(), experts["a"][name].double().numpy(), 0.01)
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_wide_bound_gives_the_expert_and_none_the_base() -> None:
    tau = random_tasks(1, 6, 5)
    assert run("nearswap", tau, t=1.0).delta.equal(tau[0])
    assert not run("nearswap", tau, t=0).delta.any()


def test_nearswap_takes_one_expert_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nearswap takes exactly 1 expert, not 2"):
        acemerge.merge_task_vectors(random_tasks(2, 4, 4), method="nearswap")
    models = write_models(tmp_path, experts=2)
    with pytest.raises(InputError, match="method 'nearswap' takes exactly 1 expert, 2 were given"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="nearswap")
