"""LARV: its proxies, scores and scales against their transcription, over whole models, in any order and in cores."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acemerge import merge_state_dicts
from acemerge.errors import InputError
from acemerge.methods import Context
from acemerge.methods.larv import LarvOptions, LarvStatistics, effective_rank, measure
from acemerge.numerics.frame import Factors, to_cores
from frontier_references import larv_commutator, larv_effective_rank, larv_scores
from spectral_cases import error, every_shape, experts, gaussian, merge, rotation, run
from spectral_references import reference_ties

LAYERS = 6
SIZES = ((8, 8), (12, 6))


def deep_model() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Two matrices and a bias in each layer; changes of different rank and size."""
    base: dict[str, Tensor] = {}
    tuned: dict[str, dict[str, Tensor]] = {"x": {}, "y": {}, "z": {}}
    for layer in range(LAYERS):
        for j, shape in enumerate(SIZES):
            name = f"layers.{layer}.part{j}.weight"
            base[name] = gaussian(*shape, seed=10 * layer + j)
            for t, expert in enumerate(tuned.values()):
                change = experts(1, *shape, decay=0.4 * layer + j, seed=100 * layer + 10 * j + t)[0]
                expert[name] = base[name] + change
        base[f"layers.{layer}.part0.bias"] = gaussian(5, seed=layer)
        for t, expert in enumerate(tuned.values()):
            expert[f"layers.{layer}.part0.bias"] = base[f"layers.{layer}.part0.bias"] + 0.01 * t
    return base, tuned


NAMES = [f"layers.{layer}.part{j}.weight" for layer in range(LAYERS) for j in range(len(SIZES))]


def expected_scales(base: dict[str, Tensor], tuned: dict[str, dict[str, Tensor]], gate: str = "tiers") -> dict[str, float]:
    bases = [base[name].numpy() for name in NAMES]
    means = [sum(expert[name].numpy() - base[name].numpy() for expert in tuned.values()) / 3 for name in NAMES]
    score = larv_scores(bases, means, [int(name.split(".")[1]) for name in NAMES])
    if gate == "continuous":
        return dict(zip(NAMES, 1 + 0.5 * np.tanh(3 * (score - 1)), strict=True))
    tiers = np.select([score >= np.quantile(score, 2 / 3), score >= np.quantile(score, 1 / 3)], [1.0, 0.75], 0.5)
    return dict(zip(NAMES, tiers, strict=True))


@pytest.mark.parametrize("gate", ["tiers", "continuous"])
def test_larv_agrees_over_a_whole_model(gate: str) -> None:
    base, tuned = deep_model()
    merged = merge_state_dicts(base, tuned, method="larv", gate=gate)
    scales = expected_scales(base, tuned, gate)
    assert len(set(scales.values())) >= 3
    for name in NAMES:
        total = torch.stack([expert[name] - base[name] for expert in tuned.values()]).sum(0)
        assert error(merged[name] - base[name], 0.3 * scales[name] * total) <= 1e-8


def test_an_inner_method_sees_the_scaled_model() -> None:
    base, tuned = deep_model()
    merged = merge_state_dicts(base, tuned, method="larv", inner="ties")
    scales = expected_scales(base, tuned)
    scaled = [scales[name] * np.stack([(expert[name] - base[name]).numpy() for expert in tuned.values()]) for name in NAMES]
    for name, expected in zip(NAMES, reference_ties(scaled, 0.2, "mean"), strict=True):
        assert error(merged[name], base[name].numpy() + expected) <= 1e-9


def test_equal_tiers_leave_the_inner_method_alone() -> None:
    base, tuned = deep_model()
    merged = merge_state_dicts(base, tuned, method="larv", inner="tsv_m", low=1.0, middle=1.0)
    plain = merge_state_dicts(base, tuned, method="tsv_m")
    for name in base:
        assert error(merged[name], plain[name]) <= 1e-12


@every_shape
def test_effective_rank_lies_between_one_and_the_smaller_side(shape: tuple[int, int]) -> None:
    A = experts(1, *shape, decay=1.0)[0]
    assert effective_rank(A) == pytest.approx(larv_effective_rank(A.numpy()))
    assert effective_rank(torch.outer(A[:, 0], A[0])) == pytest.approx(1)
    flat = rotation(max(shape), 1)[: shape[0], : shape[1]]
    orthogonal = flat if shape[0] == shape[1] else torch.linalg.qr(gaussian(max(shape), min(shape))).Q
    assert effective_rank(orthogonal) == pytest.approx(min(shape))


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_proxies_do_not_depend_on_units(seed: int, scale: float) -> None:
    W0, task_vectors = gaussian(9, 12, seed=seed), experts(3, 9, 12, seed=seed)
    plain = measure(task_vectors, Context(base=W0))
    scaled = measure(scale * task_vectors, Context(base=W0))
    assert plain is not None
    assert scaled is not None
    assert scaled.rank_ratio == pytest.approx(plain.rank_ratio)
    assert scaled.commutator == pytest.approx(plain.commutator)
    assert 0 <= plain.commutator <= 2
    assert plain.commutator == pytest.approx(larv_commutator(W0.numpy(), task_vectors.mean(0).numpy()))
    same = measure(W0[None] * scale, Context(base=W0))
    assert same is not None
    assert same.commutator == pytest.approx(0, abs=1e-7)
    assert same.rank_ratio == pytest.approx(1)


@pytest.mark.parametrize("sides", ["both", "out", "in"])
def test_proxies_of_adapters_in_their_core(sides: Any) -> None:
    factors: list[Factors | None] = [Factors(gaussian(24, 2, seed=t), gaussian(2, 17, seed=t + 5)) for t in range(3)]
    W0 = gaussian(24, 17, seed=9)
    frame, cores = to_cores(factors, (24, 17), sides)
    dense = torch.stack([each.left @ each.right for each in factors if each])
    inside, outside = measure(cores, Context(base=W0, frame=frame)), measure(dense, Context(base=W0))
    assert inside is not None
    assert outside is not None
    assert inside.rank_ratio == pytest.approx(outside.rank_ratio)
    assert inside.commutator == pytest.approx(outside.commutator)


def test_what_nobody_changed_has_no_say() -> None:
    statistics = LarvStatistics(LarvOptions(), None)
    changed, unchanged = (Context(name, base=gaussian(6, 6)) for name in ("layers.0.a", "layers.1.a"))
    statistics.observe(experts(2, 6, 6), changed)
    statistics.observe(torch.zeros(2, 6, 6), unchanged)
    assert not statistics.end_pass()
    assert statistics.scale(unchanged) == 1.0


def test_a_tensor_alone_and_one_without_a_base_keep_their_scale() -> None:
    task_vectors = experts(3, 9, 12)
    merged = run("larv", task_vectors)
    assert error(merged.delta, 0.3 * task_vectors.sum(0)) <= 1e-12
    assert merged.warnings == ("no base weights are at hand: the scale is 1",)


@pytest.mark.parametrize("inner", ["larv", "emr", "slerp"])
def test_methods_that_cannot_be_inside_are_refused(inner: str) -> None:
    with pytest.raises(InputError, match=f"method 'larv': inner='{inner}' is not allowed"):
        merge("larv", experts(2, 8, 8), inner=inner)
