"""Multi-SLERP against its formula, and its invariants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model


def multislerp_reference(xs: Array, weights: Sequence[float], normalise: bool) -> Array:
    w = np.array(weights) / (sum(weights) if normalise else 1)
    lengths = [float(np.linalg.norm(x)) for x in xs]
    mean = np.asarray(sum(own * x / length if length else 0 * x for own, x, length in zip(w, xs, lengths, strict=True)))
    if np.linalg.norm(mean) < 1e-8:
        return np.asarray(sum(own * x for own, x in zip(w, xs, strict=True)))
    return float(w @ lengths) * mean / np.linalg.norm(mean)


@every_case
@pytest.mark.parametrize("weights", [(1, 1, 1), (0.2, 3, -0.5)])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("of", ["changes", "weights"])
def test_multislerp_against_its_formula(
    shape: tuple[int, ...], weights: tuple[float, ...], normalise: bool, of: str, dtype: torch.dtype
) -> None:
    tau, base = random_tasks(3, *shape, dtype=dtype), 0.5 * random_tasks(1, *shape, seed=9, dtype=dtype)[0]
    origin = base.double().numpy() if of == "weights" else np.zeros(shape)
    expected = multislerp_reference(origin + tau.double().numpy(), weights, normalise) - origin
    assert_matches(run("multislerp", tau, base=base, weights=weights, normalise=normalise, of=of).delta, expected, dtype)


@pytest.mark.parametrize("of", ["changes", "weights"])
def test_multislerp_of_a_whole_model(of: str) -> None:
    base, experts = small_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="multislerp", weights=[1, 2, 3], of=of)
    for name, value in merged.items():
        if value.is_floating_point():
            origin = base[name].double().numpy() if of == "changes" else 0
            xs = np.stack([e[name].double().numpy() - origin for e in experts.values()])
            expected = origin + multislerp_reference(xs, (1, 2, 3), True)
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_two_experts_of_equal_length_meet_where_slerp_has_them() -> None:
    tau = torch.nn.functional.normalize(random_tasks(2, 30), dim=1)
    torch.testing.assert_close(run("multislerp", tau).delta, run("slerp", tau).delta, rtol=1e-12, atol=1e-14)


def test_the_length_is_the_experts_mean_length() -> None:
    tau = random_tasks(4, 6, 5)
    merged = run("multislerp", tau)
    assert float(merged.delta.norm()) == pytest.approx(float(tau.flatten(1).norm(dim=1).mean()))
    assert 0 < float(merged.facts["agreement"]) < 1
    assert merged.facts["path"] == "arc"


def test_equal_experts_come_back() -> None:
    tau = random_tasks(1, 6, 5).expand(3, 6, 5)
    merged = run("multislerp", tau)
    torch.testing.assert_close(merged.delta, tau[0], rtol=1e-12, atol=1e-15)
    assert merged.facts["agreement"] == pytest.approx(1)


def test_experts_that_cancel_are_averaged() -> None:
    tau = random_tasks(1, 6, 5)
    merged = run("multislerp", torch.cat([tau, -2 * tau]))
    torch.testing.assert_close(merged.delta, -0.5 * tau[0], rtol=1e-12, atol=1e-15)
    assert merged.facts["path"] == "chord"


def test_weights_that_sum_to_zero_are_refused() -> None:
    with pytest.raises(InputError, match="sum to 0 and cannot be normalised"):
        get_method("multislerp").options({"weights": [1, -1]})
