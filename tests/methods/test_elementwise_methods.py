"""What entry-by-entry methods have in common."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import acemerge
from acemerge.errors import AcemergeError, InputError, MergeError
from acemerge.methods import get_method
from elementwise_cases import random_tasks, run, small_model


@pytest.mark.parametrize("name", ["ties", "dare_ties", "breadcrumbs", "della", "dare_task_arithmetic", "linear"])
def test_tensors_without_entries(name: str) -> None:
    assert run(name, torch.zeros(2, 0, 3)).delta.shape == (0, 3)
    assert run(name, torch.zeros(2, 3, 0)).delta.shape == (3, 0)


@pytest.mark.parametrize("name", ["ties", "dare_ties", "della", "breadcrumbs", "dare_task_arithmetic"])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused_in_words(name: str, bad: float) -> None:
    base, experts = small_model()
    experts["b"]["layers.0.weight"][3, 2] = bad
    with pytest.raises(MergeError, match=r"tensor 'layers.0.weight'.* has 1 NaN or infinite value"):
        acemerge.merge_state_dicts(base, experts, method=name)


@pytest.mark.parametrize("name", ["dare_task_arithmetic", "dare_ties", "della"])
@pytest.mark.parametrize("options", [{"drop": 1}, {"drop": -0.1}, {"rescale": "l2"}, {"seed": -1}])
def test_dropping_refuses_everything_and_nonsense(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="it must be"):
        get_method(name).options(options)


ELEMENTWISE = (
    "average", "linear", "task_arithmetic", "ties", "dare_task_arithmetic", "dare_ties", "della", "breadcrumbs", "slerp",
)  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_homogeneous(name: str) -> None:
    tau = random_tasks(2, 20, 30)
    torch.testing.assert_close(run(name, 4 * tau).delta, 4 * run(name, tau).delta, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(AcemergeError, match="has no option 'densty'"):
        get_method(name).options({"densty": 0.5})
