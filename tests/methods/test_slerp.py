"""SLERP against the textbook's formula, and its invariants."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model
from small_models import write_models


def slerp_reference(w1: Array, w2: Array, t: float) -> Array:
    """The textbook formula on flattened weights, by unit vectors and the angle's atan2."""
    a, b = w1.reshape(-1), w2.reshape(-1)
    n1, n2 = np.linalg.norm(a), np.linalg.norm(b)
    if n1 == 0 or n2 == 0:
        return (1 - t) * w1 + t * w2
    u, v = a / n1, b / n2
    theta = 2 * math.atan2(float(np.linalg.norm(u - v)), float(np.linalg.norm(u + v)))
    if abs(math.cos(theta)) > 1 - 1e-6:
        return (1 - t) * w1 + t * w2
    return (math.sin((1 - t) * theta) * w1 + math.sin(t * theta) * w2) / math.sin(theta)


@every_case
@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("with_base", [True, False])
def test_slerp_against_the_textbook(shape: tuple[int, ...], t: float, with_base: bool, dtype: torch.dtype) -> None:
    tau = random_tasks(2, *shape, dtype=dtype)
    base = 0.05 * random_tasks(1, *shape, seed=9, dtype=dtype)[0] if with_base else None
    w0 = base.double().numpy() if base is not None else np.zeros(shape)
    w1, w2 = (w0 + x.double().numpy() for x in tau)
    assert_matches(run("slerp", tau, base=base, t=t).delta, slerp_reference(w1, w2, t) - w0, dtype)


def test_slerp_of_a_whole_model() -> None:
    base, experts = small_model(2)
    far = {n: {k: 3 * w if w.is_floating_point() else w for k, w in e.items()} if n == "b" else e for n, e in experts.items()}
    merged = acemerge.merge_state_dicts(base, far, method="slerp", t=0.25)
    for name, value in merged.items():
        if value.is_floating_point():
            expected = slerp_reference(far["a"][name].double().numpy(), far["b"][name].double().numpy(), 0.25)
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_slerp_ends_at_the_experts() -> None:
    tau, base = random_tasks(2, 6, 5), random_tasks(1, 6, 5, seed=3)[0]
    torch.testing.assert_close(run("slerp", tau, base=base, t=0).delta, tau[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(run("slerp", tau, base=base, t=1).delta, tau[1], rtol=1e-12, atol=1e-14)


def test_slerp_there_is_slerp_back() -> None:
    tau, base = random_tasks(2, 6, 5), random_tasks(1, 6, 5, seed=3)[0]
    there, back = run("slerp", tau, base=base, t=0.3).delta, run("slerp", tau.flip(0), base=base, t=0.7).delta
    torch.testing.assert_close(there, back, rtol=1e-12, atol=1e-14)


def test_slerp_keeps_the_length_of_weights_of_equal_length() -> None:
    w = random_tasks(2, 6, 5)
    w = w / w.flatten(1).norm(dim=1).view(2, 1, 1)
    base = random_tasks(1, 6, 5, seed=3)[0]
    merged = run("slerp", w - base, base=base, t=0.4)
    assert float((base + merged.delta).norm()) == pytest.approx(1, abs=1e-12)
    assert merged.facts["path"] == "arc"
    assert merged.facts["cosine"] == pytest.approx(float((w[0] * w[1]).sum()))


def test_slerp_does_not_depend_on_what_base_the_weights_are_measured_from() -> None:
    w, origins = random_tasks(2, 6, 5), random_tasks(2, 6, 5, seed=3)
    results = [origin + run("slerp", w - origin, base=origin, t=0.4).delta for origin in origins]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, 1 + 1e-9, -1.0, -3.0, 0.0])
def test_slerp_of_parallel_weights_is_linear(factor: float) -> None:
    w = random_tasks(1, 6, 5)[0]
    merged = run("slerp", torch.stack([w, factor * w]), t=0.25)
    torch.testing.assert_close(merged.delta, (0.75 + 0.25 * factor) * w)
    assert merged.facts["path"] == "chord"


def test_slerp_is_continuous_where_it_turns_linear() -> None:
    w = random_tasks(2, 6, 5)
    along, across = w[0] / w[0].norm(), w[1] - w[0] * float((w[0] * w[1]).sum() / w[0].square().sum())
    across = across / across.norm()
    inside, outside = (along + math.tan(math.acos(1 - gap)) * across for gap in (0.99e-6, 1.01e-6))
    chord, arc = (run("slerp", torch.stack([along, other]), t=0.3) for other in (inside, outside))
    assert (chord.facts["path"], arc.facts["path"]) == ("chord", "arc")
    assert float((chord.delta - arc.delta).norm()) < 2e-5


def test_slerp_takes_two_experts_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="slerp joins exactly 2 experts, not 3"):
        acemerge.merge_task_vectors(random_tasks(3, 4, 4), method="slerp")
    models = write_models(tmp_path, experts=3)
    with pytest.raises(InputError, match="method 'slerp' takes exactly 2 experts, 3 were given"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="slerp")
