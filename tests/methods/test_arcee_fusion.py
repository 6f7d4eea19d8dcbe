"""Arcee Fusion against its formula, row by row, and its invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model


def softmax(row: Array) -> list[float]:
    powers = [math.exp(x - max(row)) for x in row]
    return [power / math.fsum(powers) + 1e-8 for power in powers]


def arcee_fusion_reference(w0: Array, w1: Array) -> Array:
    n = w0.shape[-1] if w0.ndim else 1
    scores = []
    for before, after in zip(w0.reshape(-1, n), w1.reshape(-1, n), strict=True):
        divergence = math.fsum(p * math.log(p / q) for p, q in zip(softmax(after), softmax(before), strict=True))
        scores += [abs(a - b) * divergence for a, b in zip(after, before, strict=True)]
    ordered = sorted(scores)
    first, median, third = (ordered[math.floor(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    chosen = np.array([score >= median + 1.5 * (third - first) for score in scores])
    return np.where(chosen.reshape(w0.shape), w1 - w0, 0.0)


@every_case
@pytest.mark.parametrize("with_base", [True, False])
def test_arcee_fusion_against_its_formula(shape: tuple[int, ...], with_base: bool, dtype: torch.dtype) -> None:
    tau = random_tasks(1, *shape, dtype=dtype)
    base = 50 * random_tasks(1, *shape, seed=9, dtype=dtype)[0] if with_base else None
    w0 = base.double().numpy() if base is not None else np.zeros(shape)
    assert_matches(run("arcee_fusion", tau, base=base).delta, arcee_fusion_reference(w0, w0 + tau[0].double().numpy()), dtype)


def test_arcee_fusion_of_a_whole_model() -> None:
    base, experts = small_model(1)
    merged = acemerge.merge_state_dicts(base, experts, method="arcee_fusion")
    for name, value in merged.items():
        if value.is_floating_point():
            w0 = base[name].double().numpy()
            tau = (experts["a"][name] - base[name]).double().numpy()
            expected = w0 + arcee_fusion_reference(w0, w0 + tau)
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_entry_is_the_experts_or_the_bases() -> None:
    tau = random_tasks(1, 30, 20)
    merged = run("arcee_fusion", tau)
    taken = merged.delta != 0
    assert merged.delta[taken].equal(tau[0][taken])
    assert 0 < float(merged.facts["kept_share"]) < 0.5
    assert float(taken.double().mean()) == merged.facts["kept_share"]


def test_the_same_entries_stand_out_in_changes_a_thousand_times_smaller() -> None:
    """The divergence is quadratic in the change: in float32 nothing would be left of it."""
    tau = random_tasks(1, 30, 20)
    base = random_tasks(1, 30, 20, seed=1)[0]
    large, small = (run("arcee_fusion", scale * tau, base=base).delta != 0 for scale in (1e-3, 1e-6))
    assert float((large == small).double().mean()) > 0.99


def test_arcee_fusion_takes_one_expert_only() -> None:
    with pytest.raises(InputError, match="arcee_fusion takes exactly 1 expert, not 2"):
        acemerge.merge_task_vectors(random_tasks(2, 4, 4), method="arcee_fusion")


def test_tensors_without_entries() -> None:
    assert run("arcee_fusion", torch.zeros(1, 0, 3)).delta.shape == (0, 3)
    assert run("arcee_fusion", torch.zeros(1, 3, 0)).delta.shape == (3, 0)
