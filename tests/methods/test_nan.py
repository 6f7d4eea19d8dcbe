"""NAN against a plain float64 transcription, and what it must keep to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from coefficient_cases import (
    PRECISIONS,
    SHAPES,
    Array,
    assert_merges_to,
    assert_relative,
    flattened,
    random_task_vectors,
    run,
    weights_of,
    whole_model,
)
from small_models import fine_tuned


def reference_nan(taus: Array, measured: Array, scale: str = "half_tasks") -> Array:
    norms = [math.sqrt(float((x**2).sum())) for x in measured]
    inverse = [1 / N if N > 0 else 0.0 for N in norms]
    s = sum(N > 0 for N in norms) / 2 if scale == "half_tasks" else 1.0
    return np.asarray(sum(s * w / sum(inverse) * tau for w, tau in zip(inverse, taus, strict=True)))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm_of", ["weights", "delta"])
@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize(("tasks", "scale"), [(2, "half_tasks"), (5, "one")])
def test_nan_formula(dtype: torch.dtype, shape: tuple[int, ...], norm_of: str, scope: str, tasks: int, scale: str) -> None:
    task_vectors = random_task_vectors(*shape, tasks=tasks, dtype=dtype)
    base = random_task_vectors(*shape, tasks=1, seed=9, dtype=dtype)[0]
    found = run("nan", task_vectors, base, norm_of=norm_of, scope=scope, scale=scale)
    taus = task_vectors.double().numpy()
    measured = taus + base.double().numpy() if norm_of == "weights" else taus
    assert_relative(found.delta, reference_nan(taus, measured, scale), PRECISIONS[dtype], size=task_vectors.double().norm())
    assert not found.warnings


@pytest.mark.parametrize("norm_of", ["weights", "delta"])
@pytest.mark.parametrize("scale", ["half_tasks", "one"])
def test_nan_of_a_whole_model(norm_of: str, scale: str) -> None:
    base, experts = whole_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="nan", norm_of=norm_of, scale=scale)
    taus = flattened(base, experts)
    start = torch.cat([base[name].reshape(-1) for name in weights_of(base)]).double().numpy()
    assert_merges_to(base, merged, reference_nan(taus, taus + start if norm_of == "weights" else taus, scale))


@pytest.mark.parametrize("norm_of", ["weights", "delta"])
def test_nan_by_layer(norm_of: str) -> None:
    base, experts = whole_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="nan", norm_of=norm_of, scope="layer")
    for name in weights_of(base):
        taus = torch.stack([expert[name] - base[name] for expert in experts.values()]).double().numpy()
        measured = taus + base[name].double().numpy() if norm_of == "weights" else taus
        assert_relative(merged[name].double() - base[name].double(), reference_nan(taus, measured), 2e-5)


def test_nan_weights_of_a_transposed_half_precision_base() -> None:
    """The base is oriented as the task vectors are, and measured in their precision."""
    base = {"h.0.mlp.c_fc.weight": torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).bfloat16()}
    experts = {f"e{i}": fine_tuned(base, i, strength=0.5) for i in range(2)}
    merged = acemerge.merge_state_dicts(base, experts, method="nan", preset="gpt2")
    name, start = "h.0.mlp.c_fc.weight", base["h.0.mlp.c_fc.weight"].double().numpy()
    weights = torch.stack([expert[name] for expert in experts.values()]).double().numpy()
    expected = torch.from_numpy(start + reference_nan(weights - start, weights))
    assert ((merged[name].double() - expected).abs() <= 2**-8 * expected.abs()).all()


def test_nan_equal_norms_are_task_arithmetic() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4)
    task_vectors /= task_vectors.flatten(1).norm(dim=1).view(-1, 1, 1)
    torch.testing.assert_close(run("nan", task_vectors, norm_of="delta").delta, task_vectors.sum(0) / 2)
    torch.testing.assert_close(run("nan", task_vectors, norm_of="delta", scale="one").delta, task_vectors.sum(0) / 4)


@given(st.integers(0, 10_000), st.integers(2, 6), st.sampled_from(["model", "layer"]))
def test_nan_coefficients_sum_to_the_scale(seed: int, tasks: int, scope: str) -> None:
    facts = run("nan", random_task_vectors(4, 5, tasks=tasks, seed=seed), norm_of="delta", scope=scope).facts
    assert math.isclose(sum(float(facts[f"coefficient_e{t}"]) for t in range(tasks)), tasks / 2)


def test_nan_doubling_a_norm_halves_its_coefficient() -> None:
    task_vectors = random_task_vectors(12, 8)
    before = run("nan", task_vectors, norm_of="delta").facts
    task_vectors[0] *= 2
    after = run("nan", task_vectors, norm_of="delta").facts
    ratio = [float(facts["coefficient_e0"]) / float(facts["coefficient_e1"]) for facts in (before, after)]
    assert math.isclose(ratio[1], ratio[0] / 2)


def test_nan_of_one_expert_is_half_of_it_with_a_warning() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1)
    found = run("nan", task_vectors, torch.ones(12, 8))
    torch.testing.assert_close(found.delta, task_vectors[0] / 2)
    assert "multiplied by 0.5" in found.warnings[0]
    whole = run("nan", task_vectors, torch.ones(12, 8), scale="one")
    torch.testing.assert_close(whole.delta, task_vectors[0])
    assert not whole.warnings


def test_nan_order() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4)
    found = run("nan", task_vectors, norm_of="delta").delta
    torch.testing.assert_close(run("nan", task_vectors[[2, 0, 3, 1]], norm_of="delta").delta, found, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_nan_leaves_out_experts_without_a_norm(scope: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    found = run("nan", task_vectors, norm_of="delta", scope=scope).delta
    torch.testing.assert_close(found, run("nan", task_vectors[[0, 2]], norm_of="delta", scope=scope).delta)
    assert not run("nan", torch.zeros(3, 4, 5), norm_of="delta", scope=scope).delta.any()


def test_nan_tiny_and_huge_norms_stay_finite() -> None:
    task_vectors = torch.tensor([[1e-40, 0], [0, 1e30]], dtype=torch.float64)
    assert torch.isfinite(run("nan", task_vectors, norm_of="delta").delta).all()


def test_nan_without_a_base_says_so() -> None:
    task_vectors = random_task_vectors(12, 8)
    found = run("nan", task_vectors)
    assert "no base weights" in found.warnings[0]
    assert found.delta.equal(run("nan", task_vectors, norm_of="delta").delta)
