"""NuSLERP against the textbook's formula, vector by vector, and its invariants."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from elementwise_cases import Array, assert_matches, every_case, random_tasks, run, small_model
from small_models import write_models


def arc(a: Array, b: Array, t: float) -> Array:
    """Of two vectors; a vector without a direction counts as orthogonal to the other."""
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    theta = math.acos(np.clip(float(a @ b) / lengths, -1, 1)) if lengths else math.pi / 2
    if abs(math.cos(theta)) > 1 - 1e-12:
        return (1 - t) * a + t * b
    return (math.sin((1 - t) * theta) * a + math.sin(t * theta) * b) / math.sin(theta)


def nuslerp_reference(x1: Array, x2: Array, t: float, scope: str) -> Array:
    if scope == "column" and x1.ndim > 1:
        return np.moveaxis(nuslerp_reference(np.moveaxis(x1, 0, -1), np.moveaxis(x2, 0, -1), t, "row"), -1, 0)
    n = x1.shape[-1] if scope == "row" and x1.ndim > 1 else x1.size
    pairs = zip(x1.reshape(-1, n), x2.reshape(-1, n), strict=True)
    return np.stack([arc(a, b, t) for a, b in pairs]).reshape(x1.shape)


@every_case
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, -0.2)])
@pytest.mark.parametrize("scope", ["tensor", "row", "column"])
@pytest.mark.parametrize("of", ["changes", "weights"])
def test_nuslerp_against_the_textbook(
    shape: tuple[int, ...], weights: tuple[float, float], scope: str, of: str, dtype: torch.dtype
) -> None:
    tau, base = random_tasks(2, *shape, dtype=dtype), 0.5 * random_tasks(1, *shape, seed=9, dtype=dtype)[0]
    origin = base.double().numpy() if of == "weights" else np.zeros(shape)
    x1, x2 = (origin + x.double().numpy() for x in tau)
    expected = nuslerp_reference(x1, x2, weights[1] / sum(weights), scope) - origin
    assert_matches(run("nuslerp", tau, base=base, weights=weights, scope=scope, of=of).delta, expected, dtype)


@pytest.mark.parametrize("of", ["changes", "weights"])
def test_nuslerp_of_a_whole_model(of: str) -> None:
    base, experts = small_model(2)
    merged = acemerge.merge_state_dicts(base, experts, method="nuslerp", weights=[1, 3], of=of, scope="row")
    for name, value in merged.items():
        if value.is_floating_point():
            w0 = base[name].double().numpy()
            origin = w0 if of == "changes" else 0
            x1, x2 = (e[name].double().numpy() - origin for e in experts.values())
            expected = origin + nuslerp_reference(x1, x2, 0.75, "row")
            np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_whole_weights_are_joined_as_slerp_does() -> None:
    tau, base = random_tasks(2, 6, 5), random_tasks(1, 6, 5, seed=3)[0]
    found = run("nuslerp", tau, base=base, weights=(0.7, 0.3), of="weights")
    torch.testing.assert_close(found.delta, run("slerp", tau, base=base, t=0.3).delta, rtol=1e-10, atol=1e-13)


def test_the_base_has_no_part_in_joined_changes() -> None:
    tau, bases = random_tasks(2, 6, 5), random_tasks(2, 6, 5, seed=3)
    results = [run("nuslerp", tau, base=base).delta for base in bases]
    assert results[0].equal(results[1])


@pytest.mark.parametrize("factor", [1.0, 2.0, -1.0, -3.0])
def test_parallel_changes_are_joined_along_the_chord(factor: float) -> None:
    tau = random_tasks(1, 6, 5)[0]
    merged = run("nuslerp", torch.stack([tau, factor * tau]), weights=(3, 1))
    torch.testing.assert_close(merged.delta, (0.75 + 0.25 * factor) * tau)
    assert merged.facts["cosine"] == pytest.approx(math.copysign(1, factor))


def test_rows_keep_their_length() -> None:
    rows = torch.nn.functional.normalize(random_tasks(2, 6, 5), dim=-1)
    assert run("nuslerp", rows, scope="row").delta.norm(dim=1).tolist() == pytest.approx([1] * 6)


def test_nuslerp_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nuslerp joins exactly 2 experts, not 3"):
        acemerge.merge_task_vectors(random_tasks(3, 4, 4), method="nuslerp")
    with pytest.raises(InputError, match="sum to 0"):
        get_method("nuslerp").options({"weights": [1, -1]})
    models = write_models(tmp_path, experts=3)
    with pytest.raises(InputError, match="method 'nuslerp' takes exactly 2 experts, 3 were given"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="nuslerp")


def test_tensors_without_entries() -> None:
    for scope in ("tensor", "row", "column"):
        assert run("nuslerp", torch.zeros(2, 0, 3), scope=scope).delta.shape == (0, 3)
