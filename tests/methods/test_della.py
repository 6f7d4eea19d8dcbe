"""DELLA against its formula, on single tensors and whole models, and its invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from acemerge.methods.della import keep_probabilities
from acemerge.numerics.dropping import l1_norm
from elementwise_cases import NAMES, assert_matches, draws, every_case, mean_over_seeds, random_tasks, run
from elementwise_references import della_reference
from small_models import fine_tuned


@every_case
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
@pytest.mark.parametrize("elect", [True, False])
@pytest.mark.parametrize(("p", "window", "weights"), [(0.3, 0.14, (1, 1, 1)), (0.6, 0.7, (0.2, 3, 0)), (0.5, 0, (1, 2, 1))])
def test_della_against_its_formula(
    shape: tuple[int, ...], rescale: str, elect: bool, p: float, window: float, weights: tuple[float, ...], dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    merged = run("della", tau, drop=p, window=window, rescale=rescale, elect=elect, weights=weights, seed=4).delta
    uniforms = [draws("w", NAMES[t], shape, 4) for t in range(3)]
    expected = della_reference(list(tau.double().numpy()), uniforms, 1 - p, window, rescale, elect, weights)
    assert_matches(merged, expected, dtype)


def test_della_of_a_whole_model_with_conv1d_matrices() -> None:
    """Rows run along d_in, whichever way the matrix is stored."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": (24,), "wte.weight": (11, 8)}
    base = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    experts = {t: fine_tuned(base, i) for i, t in enumerate("ab")}
    merged = acemerge.merge_state_dicts(base, experts, method="della", config={"model_type": "gpt2"})
    for name, tau in ((n, [(e[n] - base[n]).double().numpy() for e in experts.values()]) for n in base):
        turned = [x.T for x in tau] if "c_attn.weight" in name else tau
        delta = della_reference(turned, [draws(name, t, turned[0].shape) for t in "ab"], 0.7, 0.14, "inverse", True, (1, 1))
        delta = delta.T if "c_attn.weight" in name else delta
        np.testing.assert_allclose(merged[name].double().numpy(), base[name].double().numpy() + 1.1 * delta, atol=1e-6)


@given(seed=st.integers(0, 999), n=st.integers(2, 40), window=st.sampled_from([0.0, 0.14, 0.5]))
def test_della_probabilities_average_to_the_density_and_rise_with_magnitude(seed: int, n: int, window: float) -> None:
    tau = random_tasks(1, 3, n, seed=seed)[0].round(decimals=2)  # with ties
    pi = keep_probabilities(tau, 0.6, window)
    torch.testing.assert_close(pi.mean(1), torch.full((3,), 0.6, dtype=torch.float64), rtol=1e-12, atol=0)
    for row, probabilities in zip(tau.abs(), pi, strict=True):
        larger = row[:, None] > row[None, :]
        assert (probabilities[:, None] - probabilities[None, :])[larger].ge(0).all()


def test_della_keeps_the_expectation() -> None:
    tau, repeats = random_tasks(1, 4, 5), 400
    mean = mean_over_seeds("della", tau, repeats, drop=0.5, window=0.6, elect=False)
    pi = keep_probabilities(tau[0], 0.5, 0.6)
    assert ((mean - tau[0]).abs() < 5 * tau[0].abs() * ((1 - pi) / (pi * repeats)).sqrt()).all()


def test_della_without_a_window_drops_as_dare_does() -> None:
    tau = random_tasks(3, 9, 8)
    for rescale in ("inverse", "l1", "none"):
        della = run("della", tau, drop=0.4, window=0, elect=False, rescale=rescale, seed=1).delta
        torch.testing.assert_close(della, run("dare_task_arithmetic", tau, drop=0.4, rescale=rescale, seed=1).delta)


def test_della_that_drops_nothing_is_untrimmed_ties() -> None:
    tau = random_tasks(3, 9, 8)
    torch.testing.assert_close(run("della", tau, drop=0, window=0).delta, run("ties", tau, keep=1).delta)


def test_della_l1_flavour_keeps_the_l1_norm() -> None:
    tau = random_tasks(1, 9, 8)
    merged = run("della", tau, drop=0.6, window=0.3, rescale="l1").delta
    assert l1_norm(merged) == pytest.approx(l1_norm(tau), rel=1e-12)


def test_della_a_zero_sum_is_positive() -> None:
    tau = torch.tensor([[[2.0]], [[-2.0]]])
    assert float(run("della", tau, drop=0, window=0).delta) == 2.0


def test_della_an_expert_of_weight_zero_has_no_say() -> None:
    tau = random_tasks(3, 9, 8)
    without = run("della", tau[1:], names=("b", "c"), weights=(2, 1)).delta
    torch.testing.assert_close(run("della", tau, weights=(0, 2, 1)).delta, without)


def test_della_follows_names_not_places() -> None:
    tau = random_tasks(3, 9, 8)
    turned = run("della", tau.flip(0), names=("c", "b", "a"), weights=(3, 2, 1)).delta
    torch.testing.assert_close(turned, run("della", tau, weights=(1, 2, 3)).delta, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("p", "window"), [(0.05, 0.14), (0.95, 0.14), (0.93, 0.14), (0.5, 0.999999999), (0, 0.1)])
def test_della_refuses_probabilities_outside_0_and_1(p: float, window: float) -> None:
    with pytest.raises(InputError, match=r"ask for keep probabilities from .* give a window below"):
        get_method("della").options({"drop": p, "window": window})


def test_della_allows_certainty_for_the_largest() -> None:
    tau = random_tasks(1, 50, 6)
    merged = run("della", tau, drop=0.07, window=0.14).delta
    largest = tau[0].abs().argmax(1)
    assert merged[torch.arange(50), largest].ne(0).all()
