"""TIES against its steps, on single tensors and whole models, and its invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from acemerge.errors import InputError
from acemerge.methods import Context, get_method
from acemerge.methods.ties import TiesOptions, TiesStatistics
from elementwise_cases import (
    NAMES,
    assert_matches,
    assert_whole_model,
    differences,
    every_case,
    flatten,
    random_tasks,
    run,
    small_model,
)
from elementwise_references import ties_reference, trim_reference


@every_case
@pytest.mark.parametrize("keep", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_against_its_steps(shape: tuple[int, ...], keep: float, merge: str, scope: str, dtype: torch.dtype) -> None:
    tau = random_tasks(4, *shape, dtype=dtype)
    expected = ties_reference(list(tau.double().numpy().reshape(4, -1)), keep, merge).reshape(shape)
    assert_matches(run("ties", tau, keep=keep, merge=merge, scope=scope).delta, expected, dtype)


@pytest.mark.parametrize("keep", [0.1, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_of_a_whole_model(keep: float, merge: str, scope: str) -> None:
    base, experts = small_model()
    for name in ("layers.1.weight", "scale"):  # tensors that nobody, or not everybody, changed
        experts["b"][name] = base[name].clone()
    merged = acemerge.merge_state_dicts(base, experts, method="ties", keep=keep, merge=merge, scope=scope, alpha=0.8)
    vectors = [flatten(tau) for tau in differences(base, experts).values()]
    pieces = [base[n].numel() for n in sorted(base) if base[n].is_floating_point()] if scope == "tensor" else None
    assert_whole_model(merged, base, ties_reference(vectors, keep, merge, pieces), 0.8)


def test_ties_of_one_untrimmed_expert_is_that_expert() -> None:
    tau = random_tasks(1, 5, 4)
    assert run("ties", tau, keep=1).delta.equal(tau[0])


def test_ties_of_copies_is_the_untrimmed_original() -> None:
    tau = random_tasks(1, 5, 4, dtype=torch.float32).expand(7, 5, 4)
    assert run("ties", tau, keep=1).delta.float().equal(tau[0])


def test_ties_keeps_one_entry_more_than_its_share() -> None:
    tau = torch.arange(1.0, 11.0).view(1, 10)
    assert int(run("ties", tau, keep=0.2).delta.count_nonzero()) == 3
    assert int(run("ties", tau, keep=0.2, scope="tensor").delta.count_nonzero()) == 3


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_keeps_all_entries_of_the_threshold_magnitude(scope: str) -> None:
    tau = torch.tensor([[3.0, -2.0, 2.0, 2.0, -2.0, 1.0, 0.0, -0.0, 1.0, 1.0]])
    kept = run("ties", tau, keep=0.2, scope=scope).delta
    assert kept.tolist() == [3.0, -2.0, 2.0, 2.0, -2.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_trims_nothing_when_the_share_exceeds_the_non_zeros(scope: str) -> None:
    tau = torch.zeros(1, 50)
    tau[0, :5] = torch.tensor([1e-30, -2.0, 3e-44, 0.5, -1e30])
    assert run("ties", tau, keep=0.2, scope=scope).delta.float().equal(tau[0])


@pytest.mark.parametrize(("rest", "winner"), [([1.0, 1.0], 2.0), ([-1.0, -1.0], -2.0), ([1.0, -1.0], -2.0), ([0.0, 0.0], -2.0)])
def test_ties_exact_cancellation_takes_the_majority_sign(rest: list[float], winner: float) -> None:
    """Balanced signs count as negative, as in the official code."""
    tau = torch.tensor([[2.0, *rest], [-2.0, *rest]])
    assert float(run("ties", tau, keep=1).delta[0]) == winner


def test_ties_majority_sign_is_the_whole_models() -> None:
    base = {"a.weight": torch.zeros(1, 2), "b.weight": torch.zeros(4)}
    up, down = torch.ones(4), torch.tensor([[2.0, -1.0]])
    experts = [{"a.weight": down, "b.weight": up}, {"a.weight": -down, "b.weight": up}]
    assert acemerge.merge_state_dicts(base, experts, method="ties", keep=1)["a.weight"].tolist() == [[2.0, 1.0]]
    experts = [{"a.weight": down, "b.weight": -up}, {"a.weight": -down, "b.weight": -up}]
    assert acemerge.merge_state_dicts(base, experts, method="ties", keep=1)["a.weight"].tolist() == [[-2.0, -1.0]]


def test_ties_elects_the_same_sign_in_any_order() -> None:
    """0.1 + 0.2 - 0.3 is positive, zero or negative in float32, depending on the order."""
    tau = torch.tensor([[0.1, 1.0], [0.2, 1.0], [-0.3, 1.0]])
    results = [run("ties", tau[list(order)], keep=1).delta for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])]
    assert all(torch.allclose(result, results[0], rtol=1e-12) for result in results)
    exact = math.fsum(tau[:, 0].double().tolist())
    assert float(results[0][0].sign()) == (np.sign(exact) or 1)


@given(seed=st.integers(0, 999), keep=st.sampled_from([0.1, 0.3, 0.9, 1.0]), scale=st.sampled_from([1e-3, 0.5, 64.0]))
def test_ties_invariants(seed: int, keep: float, scale: float) -> None:
    tau = random_tasks(3, 6, 5, seed=seed)
    merged = run("ties", tau, keep=keep).delta
    u = torch.from_numpy(np.array([trim_reference(v, keep) for v in tau.numpy().reshape(3, -1)]).reshape(3, 6, 5))
    elected = u.sum(0).sign()
    assert ((merged == 0) | (merged.sign() == elected)).all()
    assert (merged.abs() <= u.abs().amax(0) + 1e-15).all()
    torch.testing.assert_close(run("ties", tau.flip(0), names=NAMES[2::-1], keep=keep).delta, merged, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(run("ties", scale * tau, keep=keep).delta, scale * merged, rtol=1e-6, atol=0)


def test_ties_of_equal_signs_is_the_mean_of_non_zeros_or_the_sum() -> None:
    tau = random_tasks(3, 6, 5).abs()
    tau[1, :3] = 0
    mean = tau.sum(0) / (tau > 0).sum(0)
    torch.testing.assert_close(run("ties", tau, keep=1).delta, mean)
    torch.testing.assert_close(run("ties", tau, keep=1, merge="sum").delta, tau.sum(0))


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 20}, {"keep": 1.01}, {"merge": "max"}])
def test_ties_refuses_percentages_and_unknown_words(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="it must be"):
        get_method("ties").options(options)


@given(seed=st.integers(0, 1000), keep=st.floats(0.05, 1), tasks=st.integers(1, 5))
def test_elected_entries_are_those_that_ties_would_sum(seed: int, keep: float, tasks: int) -> None:
    """Kept apart, trimmed, of one sign in every place; AdaMerging++ gives each expert's a coefficient."""
    task_vectors = torch.randn(tasks, 40, generator=torch.Generator().manual_seed(seed))
    context = Context("w", tuple("abcde"[:tasks]))
    statistics, more = TiesStatistics(TiesOptions(keep=keep)), True
    while more:
        statistics.observe(task_vectors, context)
        more = statistics.end_pass()
    elected = statistics.elect(task_vectors, context)
    kept = elected != 0
    assert torch.equal(elected[kept], task_vectors[kept])
    assert ((elected >= 0).all(0) | (elected <= 0).all(0)).all()
    ties = get_method("ties")
    torch.testing.assert_close(
        elected.double().sum(0), ties(task_vectors, ties.options({"keep": keep, "merge": "sum"})).delta.double()
    )
