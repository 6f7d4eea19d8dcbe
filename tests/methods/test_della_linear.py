"""Linear DELLA against its formula, and beside the methods that it lies between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from elementwise_cases import NAMES, assert_matches, draws, every_case, random_tasks, run, small_model
from elementwise_references import della_reference


@every_case
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("p", "window", "weights"), [(0.3, 0.14, (1, 1, 1)), (0.6, 0.7, (0.2, 3, -1))])
def test_della_linear_against_its_formula(
    shape: tuple[int, ...], rescale: str, normalise: bool, p: float, window: float, weights: tuple[float, ...], dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    options: dict[str, Any] = {
        "drop": p,
        "window": window,
        "rescale": rescale,
        "weights": weights,
        "normalise": normalise,
        "seed": 4,
    }
    uniforms = [draws("w", NAMES[t], shape, 4) for t in range(3)]
    expected = della_reference(list(tau.double().numpy()), uniforms, 1 - p, window, rescale, False, weights)
    assert_matches(run("della_linear", tau, **options).delta, expected / (sum(weights) if normalise else 1), dtype)


def test_della_linear_of_a_whole_model() -> None:
    base, experts = small_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="della_linear", weights=[0.5, 0.3, 0.2])
    for name, value in merged.items():
        if value.is_floating_point():
            taus = [(e[name] - base[name]).double().numpy() for e in experts.values()]
            uniforms = [draws(name, t, taus[0].shape) for t in experts]
            delta = della_reference(taus, uniforms, 0.7, 0.14, "l1", False, (0.5, 0.3, 0.2))
            np.testing.assert_allclose(value.double().numpy(), base[name].double().numpy() + delta, rtol=1e-5, atol=1e-6)


def test_della_linear_is_della_without_an_election() -> None:
    tau = random_tasks(3, 9, 8)
    options: dict[str, Any] = {"drop": 0.4, "window": 0.3, "rescale": "inverse", "weights": (1, 2, 0.5), "seed": 2}
    assert run("della_linear", tau, **options).delta.equal(run("della", tau, elect=False, **options).delta)


def test_della_linear_that_drops_nothing_is_linear() -> None:
    tau = random_tasks(3, 9, 8)
    for normalise in (True, False):
        found = run("della_linear", tau, drop=0, window=0, weights=(1, 2, -0.5), normalise=normalise).delta
        torch.testing.assert_close(found, run("linear", tau, weights=(1, 2, -0.5), normalise=normalise).delta)


def test_della_linear_keeps_each_experts_l1_norm() -> None:
    tau = random_tasks(1, 9, 8)
    assert float(run("della_linear", tau, drop=0.5).delta.abs().sum()) == pytest.approx(float(tau.abs().sum()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 0.1, "window": 0.3}, "drop=0.1 and window=0.3 ask for keep probabilities from 0.75 to 1.05"),
        ({"weights": [1, -1], "normalise": True}, "sum to 0 and cannot be normalised"),
    ],
)
def test_della_linear_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_method("della_linear").options(options)
