"""Averaging against its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import acemerge
from elementwise_cases import assert_matches, every_case, flatten, random_tasks, run, small_model


@every_case
@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_average_is_the_mean(shape: tuple[int, ...], tasks: int, dtype: torch.dtype) -> None:
    tau = random_tasks(tasks, *shape, dtype=dtype)
    assert_matches(run("average", tau).delta, sum(t.double().numpy() for t in tau) / tasks, dtype)


def test_average_of_one_expert_is_that_expert() -> None:
    tau = random_tasks(1, 5, 4)
    assert run("average", tau).delta.equal(tau[0])


def test_average_does_not_depend_on_the_order() -> None:
    tau = random_tasks(4, 5, 4)
    torch.testing.assert_close(run("average", tau.flip(0)).delta, run("average", tau).delta, rtol=1e-12, atol=1e-15)


def test_average_of_a_whole_model() -> None:
    base, experts = small_model()
    merged = acemerge.merge_state_dicts(base, experts, method="average")
    np.testing.assert_allclose(flatten(merged), np.mean([flatten(e) for e in experts.values()], axis=0), atol=1e-6)
