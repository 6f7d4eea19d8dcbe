"""Task arithmetic against its formula, and its invariants."""

from __future__ import annotations

import torch

import acemerge
from elementwise_cases import assert_matches, every_case, random_tasks, run


@every_case
def test_task_arithmetic_is_the_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tau = random_tasks(4, *shape, dtype=dtype)
    assert_matches(run("task_arithmetic", tau).delta, sum(t.double().numpy() for t in tau), dtype)


def test_task_arithmetic_of_one_expert_with_alpha_one_is_that_expert() -> None:
    tau = random_tasks(1, 5, 4)
    assert run("task_arithmetic", tau).delta.equal(tau[0])


def test_task_arithmetic_with_alpha_one_over_t_is_the_average() -> None:
    tau = random_tasks(4, 5, 4)
    torch.testing.assert_close(run("task_arithmetic", tau, alpha=0.25).delta, run("average", tau).delta)


def test_task_arithmetic_is_linear_in_each_task_vector() -> None:
    tau, other = random_tasks(3, 5, 4), random_tasks(3, 5, 4, seed=1)[1]
    changed = tau.clone()
    changed[1] += 2 * other
    expected = run("task_arithmetic", tau).delta + 2 * other
    torch.testing.assert_close(run("task_arithmetic", changed).delta, expected)


def test_task_arithmetic_scales_by_0_3_unless_told() -> None:
    tau = random_tasks(3, 5, 4)
    torch.testing.assert_close(acemerge.merge_task_vectors(tau, method="task_arithmetic"), 0.3 * tau.sum(0))
