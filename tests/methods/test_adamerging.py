"""AdaMerging's kernel and how its coefficients are learnt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from acemerge.calibration.measurements.adamerging import Learner
from acemerge.methods import Context, get_method
from acemerge.methods.adamerging import AdaMergingOptions
from data_statistics import made_up_statistics
from random_statistics import random, seeds, shapes


@given(shapes, seeds)
def test_adamerging_is_a_sum_with_its_coefficients(shape: tuple[int, int, int], seed: int) -> None:
    adamerging, task_vectors = get_method("adamerging"), random(*shape, seed=seed)
    names = tuple("abcd"[: shape[0]])
    known = made_up_statistics(adamerging, task_vectors)
    assert known is not None
    merged = adamerging(task_vectors, adamerging.options({}), Context("w", names, statistics=known))
    expected = sum(known.coefficient(name, "w") * task_vectors[t] for t, name in enumerate(names))
    torch.testing.assert_close(merged.delta, expected)
    assert merged.facts["coefficient of a"] == known.coefficient("a", "w")


@pytest.mark.parametrize("granularity", ["layer", "task"])
def test_the_first_step_of_adam_goes_against_the_slopes(granularity: Any) -> None:
    learner = Learner.new(AdaMergingOptions(granularity=granularity, learning_rate=0.01), 2, 3)
    learner.learn(torch.tensor([[1.0, 2.0, 0.5], [-1.0, -2.0, -3.0]], dtype=torch.float64))
    expected = torch.tensor([[0.29] * 3, [0.31] * 3], dtype=torch.float64)
    torch.testing.assert_close(learner.coefficients(), expected, rtol=0, atol=1e-6)


def test_coefficients_are_cut_and_then_stay() -> None:
    learner = Learner.new(AdaMergingOptions(start=0.0, learning_rate=0.1), 1, 1)
    slope = torch.ones(1, 1, dtype=torch.float64)
    learner.learn(slope)
    assert learner.raw.item() < 0
    assert learner.coefficients().item() == 0.0
    learner.learn(-slope)
    assert learner.coefficients().item() == 0.0, "a cut coefficient has no slope"
    free = Learner.new(AdaMergingOptions(start=0.0, learning_rate=0.1, clamp=False), 1, 1)
    free.learn(slope)
    assert free.coefficients().item() < 0


def test_a_learner_goes_on_where_it_stopped() -> None:
    slopes = random(6, 2, 3, seed=4)
    whole, first = (Learner.new(AdaMergingOptions(), 2, 3) for _ in range(2))
    for slope in slopes:
        whole.learn(slope)
    for slope in slopes[:4]:
        first.learn(slope)
    second = Learner.new(AdaMergingOptions(), 2, 3)
    assert second.take_up({name: tensor.clone() for name, tensor in first.state(4).items()}) == 4
    for slope in slopes[4:]:
        second.learn(slope)
    assert second.coefficients().equal(whole.coefficients())
