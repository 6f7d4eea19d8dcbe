"""The entry-by-entry methods against plain float64 transcriptions of their formulas, and their invariants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

import acemerge
from acemerge.cli.app import main
from acemerge.errors import AcemergeError, InputError, MergeError
from acemerge.methods import Context, Merged, Options, get_method
from acemerge.methods.della import keep_probabilities
from acemerge.numerics.dropping import drop, l1_norm
from acemerge.numerics.linalg import weighted_sum
from acemerge.numerics.thresholds import MagnitudeThresholds, count_of_share, trim
from small_models import base_tensors, fine_tuned, write_models

Array = NDArray[np.float64]
NAMES = tuple("abcdefgh")
SHAPES = [(), (7,), (12, 8), (8, 12), (1, 9), (3, 2, 5)]
CASES = [*((shape, torch.float64) for shape in SHAPES), *((shape, torch.float32) for shape in [(7,), (12, 8), (3, 2, 5)])]
every_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda v: str(v).removeprefix("torch."))


def random_tasks(tasks: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(tasks)], dtype=torch.float64)
    drawn = torch.randn(tasks, *shape, generator=generator, dtype=torch.float64) * strengths.view(-1, *[1] * len(shape))
    return drawn.to(dtype)


@cache
def options_of(name: str, **given: Any) -> Options:
    """Validating is slow; alpha is 1 unless given, so that results are M itself."""
    return get_method(name).options({"alpha": 1.0, **given}).resolve({})


def run(
    name: str,
    task_vectors: Tensor,
    *,
    base: Tensor | None = None,
    tensor: str = "w",
    names: Sequence[str] = NAMES,
    **options: Any,
) -> Merged:
    context = Context(tensor, tuple(names[: len(task_vectors)]), base)
    return get_method(name)(task_vectors, options_of(name, **options), context)


def mean_over_seeds(name: str, task_vectors: Tensor, repeats: int, **options: Any) -> Tensor:
    chosen: Any = options_of(name, **options)
    total = torch.zeros_like(task_vectors[0])
    for seed in range(repeats):
        total += get_method(name)(task_vectors, replace(chosen, seed=seed), Context("w", NAMES[: len(task_vectors)])).delta
    return total / repeats


def assert_matches(merged: Tensor, expected: Array | Tensor, dtype: torch.dtype) -> None:
    """1e-4 relative to the largest entry in float32 (in fact much closer), 1e-9 in float64."""
    reference = torch.as_tensor(expected, dtype=torch.float64)
    assert merged.shape == reference.shape
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(merged.double(), reference, rtol=tolerance, atol=tolerance * float(reference.abs().max()))


# -- whole models, flattened, in numpy


def flatten(tensors: Mapping[str, Tensor]) -> Array:
    return np.concatenate([tensors[n].double().numpy().reshape(-1) for n in sorted(tensors) if tensors[n].is_floating_point()])


def small_model(experts: int = 3, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    base = {n: w.to(dtype) if w.is_floating_point() else w for n, w in base_tensors().items()}
    return base, {name: fine_tuned(base, i) for i, name in zip(range(experts), NAMES, strict=False)}


def differences(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """tau_t in the dtype of the files, as the engine forms them."""
    return {t: {n: expert[n] - base[n] for n in base} for t, expert in experts.items()}


def assert_whole_model(merged: Mapping[str, Tensor], base: Mapping[str, Tensor], delta: Array, alpha: float) -> None:
    np.testing.assert_allclose(flatten(merged), flatten(base) + alpha * delta, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- average


@every_case
@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_average_is_the_mean(shape: tuple[int, ...], tasks: int, dtype: torch.dtype) -> None:
    tau = random_tasks(tasks, *shape, dtype=dtype)
    assert_matches(run("average", tau).delta, sum(t.double().numpy() for t in tau) / tasks, dtype)


def test_average_of_one_expert_is_that_expert() -> None:
    tau = random_tasks(1, 5, 4)
    assert run("average", tau).delta.equal(tau[0])


def test_average_does_not_depend_on_the_order() -> None:
    tau = random_tasks(4, 5, 4)
    torch.testing.assert_close(run("average", tau.flip(0)).delta, run("average", tau).delta, rtol=1e-12, atol=1e-15)


def test_average_of_a_whole_model() -> None:
    base, experts = small_model()
    merged = acemerge.merge_state_dicts(base, experts, method="average")
    np.testing.assert_allclose(flatten(merged), np.mean([flatten(e) for e in experts.values()], axis=0), atol=1e-6)


# -------------------------------------------------------------------------------------------------- task arithmetic


@every_case
def test_task_arithmetic_is_the_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tau = random_tasks(4, *shape, dtype=dtype)
    assert_matches(run("task_arithmetic", tau).delta, sum(t.double().numpy() for t in tau), dtype)


def test_task_arithmetic_of_one_expert_with_alpha_one_is_that_expert() -> None:
    tau = random_tasks(1, 5, 4)
    assert run("task_arithmetic", tau).delta.equal(tau[0])


def test_task_arithmetic_with_alpha_one_over_t_is_the_average() -> None:
    tau = random_tasks(4, 5, 4)
    torch.testing.assert_close(run("task_arithmetic", tau, alpha=0.25).delta, run("average", tau).delta)


def test_task_arithmetic_is_linear_in_each_task_vector() -> None:
    tau, other = random_tasks(3, 5, 4), random_tasks(3, 5, 4, seed=1)[1]
    changed = tau.clone()
    changed[1] += 2 * other
    expected = run("task_arithmetic", tau).delta + 2 * other
    torch.testing.assert_close(run("task_arithmetic", changed).delta, expected)


def test_task_arithmetic_scales_by_0_3_unless_told() -> None:
    tau = random_tasks(3, 5, 4)
    torch.testing.assert_close(acemerge.merge_task_vectors(tau, method="task_arithmetic"), 0.3 * tau.sum(0))


# ----------------------------------------------------------------------------------------------------------- linear


@every_case
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("weights", [(0.7, 0.3, 1.0), (2.0, 0.0, -0.5), (1.0, 1.0, 1.0)])
def test_linear_against_its_formula(
    shape: tuple[int, ...], weights: tuple[float, ...], normalise: bool, dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    expected = sum(w * t.double().numpy() for w, t in zip(weights, tau, strict=True)) / (sum(weights) if normalise else 1)
    assert_matches(run("linear", tau, weights=weights, normalise=normalise).delta, expected, dtype)


def test_linear_is_the_weighted_average_of_the_weights() -> None:
    base, experts = small_model()
    merged = acemerge.merge_state_dicts(base, experts, method="linear", weights=[3, 1, 1])
    w = {"a": 0.6, "b": 0.2, "c": 0.2}
    np.testing.assert_allclose(flatten(merged), sum(w[n] * flatten(experts[n]) for n in w), atol=1e-6)


def test_linear_without_weights_is_the_average_or_the_sum() -> None:
    tau = random_tasks(4, 5, 4)
    assert run("linear", tau).delta.equal(run("average", tau).delta)
    assert run("linear", tau, normalise=False).delta.equal(run("task_arithmetic", tau).delta)
    torch.testing.assert_close(run("linear", tau).delta, tau.mean(0))
    torch.testing.assert_close(run("linear", tau, normalise=False).delta, tau.sum(0))


def test_linear_ignores_the_scale_of_its_weights() -> None:
    tau = random_tasks(3, 5, 4)
    torch.testing.assert_close(run("linear", tau, weights=(1, 2, 4)).delta, run("linear", tau, weights=(10, 20, 40)).delta)


def test_linear_with_one_weight_returns_that_expert() -> None:
    tau = random_tasks(3, 5, 4)
    assert run("linear", tau, weights=(0, 1, 0)).delta.equal(tau[1])
    assert run("linear", tau[:1], weights=5).delta.equal(tau[0])


@pytest.mark.parametrize("weights", [(1, -1), (0, 0, 0), (0.1, 0.2, -0.3)])
def test_linear_refuses_weights_that_sum_to_zero(weights: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="sum to 0 and cannot be normalised"):
        get_method("linear").options({"weights": weights})
    assert get_method("linear").options({"weights": weights, "normalise": False})


@pytest.mark.parametrize("name", ["linear", "della"])
def test_weights_must_be_one_per_expert(name: str) -> None:
    with pytest.raises(
        InputError, match=r"'w': weights=\[0.7, 0.3\] are 2 numbers for 3 experts \(a, b, c\); give one per expert"
    ):
        run(name, random_tasks(3, 5, 4), weights=(0.7, 0.3))


def test_a_tensor_that_an_expert_lacks_needs_weights_of_its_own() -> None:
    base, experts = small_model()
    del experts["b"]["embed.weight"]
    merge: Callable[..., dict[str, Tensor]] = acemerge.merge_state_dicts
    with pytest.raises(InputError, match=r"are 3 numbers for 2 experts; give one per expert for 'embed\.weight'"):
        merge(base, experts, method="linear", missing="skip", weights=[1, 2, 3])
    rule = {"match": "embed.weight", "options": {"weights": [1, 3]}}
    merged = merge(base, experts, method="linear", missing="skip", tensors=[rule], weights=[1, 2, 3])
    expected = (experts["a"]["embed.weight"] + 3 * experts["c"]["embed.weight"]) / 4
    torch.testing.assert_close(merged["embed.weight"], expected)


@pytest.mark.parametrize("given_weights", ["0.7,0.3", " 0.7 , 3e-1 ", "[0.7, 0.3]", [0.7, "0.3"], (0.7, 0.3)])
def test_weights_as_text_or_list(given_weights: Any) -> None:
    options = get_method("linear").options({"weights": given_weights})
    assert vars(options)["weights"] == (0.7, 0.3)
    assert hash(options) == hash(get_method("linear").options({"weights": [0.7, 0.3]}))


@pytest.mark.parametrize("bad", ["a,b", "0.7;0.3", "1,nan", [1, float("inf")], {"a": 1}, "", "1,,2", None])
def test_bad_weights_are_explained_once(bad: Any) -> None:
    with pytest.raises(InputError) as caught:
        get_method("linear").options({"weights": bad})
    assert str(caught.value) == (
        f"method 'linear': weights={bad!r} is not allowed: it must be 'equal' or a list, each entry a number"
    )


def test_options_that_are_lists_are_described() -> None:
    described = {option.name: option for option in get_method("della").describe_options()}
    assert described["weights"].allowed == "'equal' or a list, each entry a number >= 0"
    assert described["weights"].default == "equal"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()


@pytest.mark.parametrize("text", ["3,1", "[3, 1]"])
def test_weights_on_the_command_line_and_in_the_recipe_it_writes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = write_models(tmp_path, experts=2)
    out = tmp_path / "out"
    command(monkeypatch, "merge", *models.arguments, "-o", out, "-q", "-m", "linear", "-s", f"weights={text}")
    recipe = yaml.safe_load((out / "acemerge.yaml").read_text())
    assert recipe["options"]["weights"] == [3.0, 1.0]
    first, second = (load_file(folder / "model.safetensors") for folder in models.experts)
    merged = load_file(out / "model.safetensors")
    torch.testing.assert_close(merged["embed.weight"], 0.75 * first["embed.weight"] + 0.25 * second["embed.weight"])
    (tmp_path / "again.yaml").write_text((out / "acemerge.yaml").read_text())
    command(monkeypatch, "merge", tmp_path / "again.yaml", "-o", tmp_path / "again", "-q")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_weighted_sum_is_exact_in_any_order() -> None:
    x = torch.tensor([[0.1], [0.2], [-0.3], [1e-9]])  # float32: their sum depends on the order
    sums = {float(weighted_sum(x[list(order)], [1.0] * 4)) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])}
    assert sums == {math.fsum(x.double().reshape(-1).tolist())}


# ------------------------------------------------------------------------------------------------------------ slerp


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


# ------------------------------------------------------------------------------------------------------------- TIES


def exact_floor(size: int, share: float) -> int:
    return int(Fraction(str(share)) * size)


def trim_reference(v: Array, keep: float) -> Array:
    """Keep the entries that reach the (d - floor(d k))-th smallest magnitude."""
    rank = len(v) - exact_floor(len(v), keep)
    threshold = sorted(abs(v))[rank - 1] if rank else 0.0
    return np.array([x if abs(x) >= threshold else 0.0 for x in v])


def ties_reference(vectors: Sequence[Array], keep: float, merge: str, pieces: Sequence[int] | None = None) -> Array:
    """Whole-model TIES on flattened vectors, entry by entry; `pieces` are the tensors' sizes if trimmed one by one."""
    cuts: list[int] = np.cumsum(pieces)[:-1].tolist() if pieces is not None else []
    u = np.array([np.concatenate([trim_reference(piece, keep) for piece in np.split(v, cuts)]) for v in vectors])
    totals = [math.fsum(u[:, j]) for j in range(u.shape[1])]
    majority = 1 if sum(np.sign(totals)) > 0 else -1
    merged = np.zeros(u.shape[1])
    for j, total in enumerate(totals):
        elected = np.sign(total) or majority
        agreeing = [x for x in u[:, j] if np.sign(x) == elected]
        merged[j] = sum(agreeing) / (max(1, len(agreeing)) if merge == "mean" else 1)
    return merged


@every_case
@pytest.mark.parametrize("keep", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_against_its_steps(shape: tuple[int, ...], keep: float, merge: str, scope: str, dtype: torch.dtype) -> None:
    tau = random_tasks(4, *shape, dtype=dtype)
    expected = ties_reference(list(tau.double().numpy().reshape(4, -1)), keep, merge).reshape(shape)
    assert_matches(run("ties", tau, keep=keep, merge=merge, scope=scope).delta, expected, dtype)


@pytest.mark.parametrize("keep", [0.1, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_of_a_whole_model(keep: float, merge: str, scope: str) -> None:
    base, experts = small_model()
    for name in ("layers.1.weight", "scale"):  # tensors that nobody, or not everybody, changed
        experts["b"][name] = base[name].clone()
    merged = acemerge.merge_state_dicts(base, experts, method="ties", keep=keep, merge=merge, scope=scope, alpha=0.8)
    vectors = [flatten(tau) for tau in differences(base, experts).values()]
    pieces = [base[n].numel() for n in sorted(base) if base[n].is_floating_point()] if scope == "tensor" else None
    assert_whole_model(merged, base, ties_reference(vectors, keep, merge, pieces), 0.8)


def test_ties_of_one_untrimmed_expert_is_that_expert() -> None:
    tau = random_tasks(1, 5, 4)
    assert run("ties", tau, keep=1).delta.equal(tau[0])


def test_ties_of_copies_is_the_untrimmed_original() -> None:
    tau = random_tasks(1, 5, 4, dtype=torch.float32).expand(7, 5, 4)
    assert run("ties", tau, keep=1).delta.float().equal(tau[0])


def test_ties_keeps_one_entry_more_than_its_share() -> None:
    tau = torch.arange(1.0, 11.0).view(1, 10)
    assert int(run("ties", tau, keep=0.2).delta.count_nonzero()) == 3
    assert int(run("ties", tau, keep=0.2, scope="tensor").delta.count_nonzero()) == 3


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_keeps_all_entries_of_the_threshold_magnitude(scope: str) -> None:
    tau = torch.tensor([[3.0, -2.0, 2.0, 2.0, -2.0, 1.0, 0.0, -0.0, 1.0, 1.0]])
    kept = run("ties", tau, keep=0.2, scope=scope).delta
    assert kept.tolist() == [3.0, -2.0, 2.0, 2.0, -2.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_trims_nothing_when_the_share_exceeds_the_non_zeros(scope: str) -> None:
    tau = torch.zeros(1, 50)
    tau[0, :5] = torch.tensor([1e-30, -2.0, 3e-44, 0.5, -1e30])
    assert run("ties", tau, keep=0.2, scope=scope).delta.float().equal(tau[0])


@pytest.mark.parametrize(("rest", "winner"), [([1.0, 1.0], 2.0), ([-1.0, -1.0], -2.0), ([1.0, -1.0], -2.0), ([0.0, 0.0], -2.0)])
def test_ties_exact_cancellation_takes_the_majority_sign(rest: list[float], winner: float) -> None:
    """Balanced signs count as negative, as in the official code."""
    tau = torch.tensor([[2.0, *rest], [-2.0, *rest]])
    assert float(run("ties", tau, keep=1).delta[0]) == winner


def test_ties_majority_sign_is_the_whole_models() -> None:
    base = {"a.weight": torch.zeros(1, 2), "b.weight": torch.zeros(4)}
    up, down = torch.ones(4), torch.tensor([[2.0, -1.0]])
    experts = [{"a.weight": down, "b.weight": up}, {"a.weight": -down, "b.weight": up}]
    assert acemerge.merge_state_dicts(base, experts, method="ties", keep=1)["a.weight"].tolist() == [[2.0, 1.0]]
    experts = [{"a.weight": down, "b.weight": -up}, {"a.weight": -down, "b.weight": -up}]
    assert acemerge.merge_state_dicts(base, experts, method="ties", keep=1)["a.weight"].tolist() == [[-2.0, -1.0]]


def test_ties_elects_the_same_sign_in_any_order() -> None:
    """0.1 + 0.2 - 0.3 is positive, zero or negative in float32, depending on the order."""
    tau = torch.tensor([[0.1, 1.0], [0.2, 1.0], [-0.3, 1.0]])
    results = [run("ties", tau[list(order)], keep=1).delta for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])]
    assert all(torch.allclose(result, results[0], rtol=1e-12) for result in results)
    exact = math.fsum(tau[:, 0].double().tolist())
    assert float(results[0][0].sign()) == (np.sign(exact) or 1)


@given(seed=st.integers(0, 999), keep=st.sampled_from([0.1, 0.3, 0.9, 1.0]), scale=st.sampled_from([1e-3, 0.5, 64.0]))
def test_ties_invariants(seed: int, keep: float, scale: float) -> None:
    tau = random_tasks(3, 6, 5, seed=seed)
    merged = run("ties", tau, keep=keep).delta
    u = torch.from_numpy(np.array([trim_reference(v, keep) for v in tau.numpy().reshape(3, -1)]).reshape(3, 6, 5))
    elected = u.sum(0).sign()
    assert ((merged == 0) | (merged.sign() == elected)).all()
    assert (merged.abs() <= u.abs().amax(0) + 1e-15).all()
    torch.testing.assert_close(run("ties", tau.flip(0), names=NAMES[2::-1], keep=keep).delta, merged, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(run("ties", scale * tau, keep=keep).delta, scale * merged, rtol=1e-6, atol=0)


def test_ties_of_equal_signs_is_the_mean_of_non_zeros_or_the_sum() -> None:
    tau = random_tasks(3, 6, 5).abs()
    tau[1, :3] = 0
    mean = tau.sum(0) / (tau > 0).sum(0)
    torch.testing.assert_close(run("ties", tau, keep=1).delta, mean)
    torch.testing.assert_close(run("ties", tau, keep=1, merge="sum").delta, tau.sum(0))


@given(
    pieces=st.lists(
        st.lists(st.floats(-4, 4, width=16) | st.floats(width=32, allow_nan=False), max_size=9), min_size=1, max_size=4
    ),
    keep=st.floats(0.01, 0.99),
)
def test_streamed_thresholds_are_the_exact_order_statistic(pieces: list[list[float]], keep: float) -> None:
    thresholds = MagnitudeThresholds(keep)
    passes = 1
    for piece in pieces:
        thresholds.observe(torch.tensor([piece], dtype=torch.float32), ["a"])
    while thresholds.end_pass():
        passes += 1
        for piece in pieces:
            thresholds.observe(torch.tensor([piece], dtype=torch.float32), ["a"])
    values = sorted(abs(x) for piece in pieces for x in piece)
    assert passes == 2
    if values:
        assert thresholds.threshold("a") == values[len(values) - exact_floor(len(values), keep) - 1]
        c = thresholds.threshold("a")
        assert sum(value >= c for value in values) >= exact_floor(len(values), keep) + 1
        for piece in pieces:
            expected = [x if abs(x) >= c else 0.0 for x in piece]
            assert trim(torch.tensor(piece, dtype=torch.float32), c).tolist() == expected
            assert trim(torch.tensor(piece, dtype=torch.float64), c).tolist() == expected
    else:
        assert thresholds.threshold("a") == 0


def test_streamed_thresholds_know_experts_apart() -> None:
    thresholds = MagnitudeThresholds(0.5)
    tensors = [(torch.tensor([[1.0, 2.0], [10.0, 20.0]]), ["a", "b"]), (torch.tensor([[3.0, 4.0]]), ["b"])]
    more = True
    while more:
        for task_vectors, experts in tensors:
            thresholds.observe(task_vectors, experts)
        more = thresholds.end_pass()
    assert (thresholds.threshold("a"), thresholds.threshold("b")) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("size", "share", "count"), [(100, 0.29, 29), (10, 0.7, 7), (3, 1.0, 3), (9, 0.1, 0), (10**10, 0.57, 57 * 10**8)]
)
def test_shares_are_counted_as_written(size: int, share: float, count: int) -> None:
    assert count_of_share(size, share) == count


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


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 20}, {"keep": 1.01}, {"merge": "max"}])
def test_ties_refuses_percentages_and_unknown_words(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="it must be"):
        get_method("ties").options(options)


# ------------------------------------------------------------------------------------------------------------- DARE


def draws(tensor: str, expert: str, shape: Sequence[int], seed: int = 0) -> Array:
    """The random numbers in [0, 1) that belong to a seed, an expert and a tensor."""
    generator = Context(tensor, (expert,)).generator(seed, 0)
    drawn: Array = torch.rand(tuple(shape), generator=generator, dtype=torch.float32).double().numpy()
    return drawn


def dare_reference(tau: Array, uniform: Array, p: float, rescale: str) -> Array:
    kept: Array = np.where(uniform < np.float32(1 - p), tau, 0.0)
    if rescale == "inverse":
        return kept / (1 - p)
    if rescale == "l1" and abs(kept).sum() > 0:
        return kept * float(abs(tau).sum() / abs(kept).sum())
    return kept


@every_case
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
def test_dare_task_arithmetic_against_its_formula(shape: tuple[int, ...], p: float, rescale: str, dtype: torch.dtype) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    merged = run("dare_task_arithmetic", tau, drop=p, rescale=rescale, seed=5).delta
    expected = sum(dare_reference(tau[t].double().numpy(), draws("w", NAMES[t], shape, 5), p, rescale) for t in range(3))
    assert_matches(merged, np.asarray(expected), dtype)


def test_dare_task_arithmetic_of_a_whole_model() -> None:
    base, experts = small_model()
    merged = acemerge.merge_state_dicts(base, experts, method="dare_task_arithmetic", drop=0.5, seed=3)
    for name, value in merged.items():
        if value.is_floating_point():
            taus = {t: e[name].double().numpy() - base[name].double().numpy() for t, e in experts.items()}
            delta = sum(dare_reference(tau, draws(name, t, base[name].shape, 3), 0.5, "inverse") for t, tau in taus.items())
            np.testing.assert_allclose(value.double().numpy(), base[name].double().numpy() + 0.3 * delta, atol=1e-6)


def test_dare_without_dropping_is_task_arithmetic_and_ties() -> None:
    base, experts = small_model()
    for plain, dropping in (("task_arithmetic", "dare_task_arithmetic"), ("ties", "dare_ties")):
        expected = acemerge.merge_state_dicts(base, experts, method=plain)
        for rescale in ("inverse", "l1"):
            merged = acemerge.merge_state_dicts(base, experts, method=dropping, drop=0, rescale=rescale)
            assert all(merged[name].equal(expected[name]) for name in base)


def test_dare_keeps_the_expectation() -> None:
    tau, p, repeats = random_tasks(1, 4, 5), 0.6, 400
    mean = mean_over_seeds("dare_task_arithmetic", tau, repeats, drop=p)
    deviation = tau[0].abs() * math.sqrt(p / ((1 - p) * repeats))
    assert ((mean - tau[0]).abs() < 5 * deviation).all()


def test_dare_drops_the_share_it_says() -> None:
    tau = random_tasks(1, 200, 200)
    zeros = float((run("dare_task_arithmetic", tau, drop=0.7).delta == 0).double().mean())
    assert zeros == pytest.approx(0.7, abs=5 * math.sqrt(0.21) / 200)


def test_dare_l1_flavour_keeps_the_l1_norm() -> None:
    tau = random_tasks(1, 9, 8)
    merged = run("dare_task_arithmetic", tau, drop=0.6, rescale="l1").delta
    assert l1_norm(merged) == pytest.approx(l1_norm(tau), rel=1e-12)


def test_dare_l1_flavour_when_nothing_is_left() -> None:
    tau = random_tasks(1)
    seed = next(s for s in range(100) if draws("w", "a", (), s) >= 0.5)
    assert float(run("dare_task_arithmetic", tau, drop=0.5, rescale="l1", seed=seed).delta) == 0


def test_dare_masks_are_independent_and_belong_to_names() -> None:
    ones = torch.ones(2, 40, 40)
    both = run("dare_task_arithmetic", ones, drop=0.5, rescale="none").delta
    assert set(both.reshape(-1).tolist()) == {0.0, 1.0, 2.0}
    alone = run("dare_task_arithmetic", ones[1:], names=("b",), drop=0.5, rescale="none").delta
    first = run("dare_task_arithmetic", ones[:1], drop=0.5, rescale="none").delta
    assert both.equal(first + alone)  # an expert's mask does not depend on who else is there
    other_seed = run("dare_task_arithmetic", ones[:1], drop=0.5, rescale="none", seed=1).delta
    other_tensor = run("dare_task_arithmetic", ones[:1], drop=0.5, rescale="none", tensor="v").delta
    for other in (other_seed, other_tensor, alone):
        assert float((first == other).double().mean()) == pytest.approx(0.5, abs=0.07)


def test_dare_masks_do_not_depend_on_the_dtype() -> None:
    tau = random_tasks(1, 30, 30)
    wide, narrow = (run("dare_task_arithmetic", x, drop=0.37).delta for x in (tau, tau.float()))
    assert (wide == 0).equal(narrow == 0)


def test_dare_is_homogeneous() -> None:
    tau = random_tasks(3, 9, 8)
    for rescale in ("inverse", "l1", "none"):
        small = run("dare_task_arithmetic", 1e-12 * tau, drop=0.6, rescale=rescale).delta
        torch.testing.assert_close(
            small, 1e-12 * run("dare_task_arithmetic", tau, drop=0.6, rescale=rescale).delta, atol=0, rtol=1e-9
        )


@pytest.mark.parametrize("name", ["dare_task_arithmetic", "dare_ties"])
def test_dare_can_leave_vectors_whole(name: str) -> None:
    plain = {"dare_task_arithmetic": "task_arithmetic", "dare_ties": "ties"}[name]
    for shape in ((), (9,)):
        tau = random_tasks(3, *shape)
        torch.testing.assert_close(run(name, tau, drop=0.9, drop_vectors=False).delta, run(plain, tau).delta)
    tau = random_tasks(3, 9, 1)
    assert run(name, tau, drop=0.9, drop_vectors=False).delta.equal(run(name, tau, drop=0.9).delta)


@pytest.mark.parametrize("name", ["dare_task_arithmetic", "dare_ties", "della"])
@pytest.mark.parametrize("options", [{"drop": 1}, {"drop": -0.1}, {"rescale": "l2"}, {"seed": -1}])
def test_dropping_refuses_everything_and_nonsense(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="it must be"):
        get_method(name).options(options)


def test_drop_leaves_its_input_alone() -> None:
    tau = random_tasks(1, 5, 5)[0]
    before = tau.clone()
    for rescale in ("inverse", "l1", "none"):
        drop(tau, 0.5, rescale, torch.Generator().manual_seed(0))
    assert tau.equal(before)


@pytest.mark.parametrize("keep", [0.2, 0.8, 1.0])
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
@pytest.mark.parametrize("rescale", ["inverse", "l1"])
def test_dare_ties_of_a_whole_model(keep: float, merge: str, scope: str, rescale: str) -> None:
    """The thresholds and the majority sign are those of the dropped vectors."""
    base, experts = small_model(dtype=torch.float64)
    names = [n for n in sorted(base) if base[n].is_floating_point()]
    merged = acemerge.merge_state_dicts(
        base, experts, method="dare_ties", drop=0.4, keep=keep, merge=merge, scope=scope, rescale=rescale, seed=2
    )
    vectors = [
        np.concatenate(
            [dare_reference(tau[n].double().numpy(), draws(n, t, base[n].shape, 2), 0.4, rescale).reshape(-1) for n in names]
        )
        for t, tau in differences(base, experts).items()
    ]
    pieces = [base[n].numel() for n in names] if scope == "tensor" else None
    assert_whole_model(merged, base, ties_reference(vectors, keep, merge, pieces), 1.0)


@every_case
def test_dare_ties_against_its_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tau = random_tasks(4, *shape, dtype=dtype)
    dropped = [dare_reference(tau[t].double().numpy(), draws("w", NAMES[t], shape), 0.3, "inverse").reshape(-1) for t in range(4)]
    expected = ties_reference(dropped, 0.4, "mean").reshape(shape)
    assert_matches(run("dare_ties", tau, drop=0.3, keep=0.4).delta, expected, dtype)


def test_dare_ties_trims_nothing_when_dropping_leaves_less() -> None:
    tau = random_tasks(3, 30, 30)
    loose, all_of_it = (run("dare_ties", tau, drop=0.8, keep=keep).delta for keep in (0.5, 1.0))
    assert loose.equal(all_of_it)


# ------------------------------------------------------------------------------------------------------------ DELLA


def della_probabilities(tau: Array, q: float, window: float) -> Array:
    """pi_j = (q - eps) + 2 eps (rank_j - 1) / (n - 1) along the last axis, ties in order of position."""
    if tau.ndim == 0:
        return np.array(q)
    n = tau.shape[-1]
    pi = np.zeros_like(tau)
    for index in np.ndindex(tau.shape[:-1]):
        order = sorted(range(n), key=lambda j: (abs(tau[index][j]), j))
        for rank, j in enumerate(order, 1):
            pi[index][j] = q - window / 2 + window * (rank - 1) / (n - 1) if n > 1 else q
    return pi


def della_reference(
    taus: Sequence[Array], uniforms: Sequence[Array], q: float, window: float, rescale: str, elect: bool, weights: Sequence[float]
) -> Array:
    ds = []
    for tau, uniform in zip(taus, uniforms, strict=True):
        pi = della_probabilities(tau, q, window)
        d = np.where(uniform < pi, tau, 0.0)
        if rescale == "inverse":
            d = d / pi
        elif rescale == "l1" and abs(d).sum() > 0:
            d = d * abs(tau).sum() / abs(d).sum()
        ds.append(d)
    weighted = np.array([w * d for w, d in zip(weights, ds, strict=True)])
    if not elect:
        return np.asarray(weighted.sum(0))
    merged = np.zeros(taus[0].shape)
    for index in np.ndindex(taus[0].shape):
        sign = 1.0 if math.fsum(weighted[(slice(None), *index)]) >= 0 else -1.0
        agreeing = [t for t in range(len(ds)) if np.sign(weighted[(t, *index)]) == sign]
        if agreeing:
            merged[index] = sum(weighted[(t, *index)] for t in agreeing) / sum(weights[t] for t in agreeing)
    return merged


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


# ------------------------------------------------------------------------------------------------------ breadcrumbs


def breadcrumbs_reference(tau: Array, keep: float, outliers: float, scope: str) -> Array:
    if tau.ndim == 0:
        return tau
    rows = tau.reshape(-1, tau.shape[-1] if scope == "row" else tau.size)
    masked = np.zeros_like(rows)
    n = rows.shape[1]
    for row, out in zip(rows, masked, strict=True):
        left = sorted(range(n), key=lambda j: (-abs(row[j]), j))[exact_floor(n, outliers) :]
        for j in left[: exact_floor(n, keep)]:
            out[j] = row[j]
    return masked.reshape(tau.shape)


@pytest.mark.parametrize(("shape", "dtype"), [*CASES, ((3, 40), torch.float32), ((4, 3, 3, 3), torch.float64)])
@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize(("keep", "outliers"), [(0.2, 0.1), (0.15, 0.006), (0.29, 0), (1, 0.3), (0.8, 0.5)])
def test_breadcrumbs_against_its_formula(
    shape: tuple[int, ...], scope: str, keep: float, outliers: float, dtype: torch.dtype
) -> None:
    tau = random_tasks(3, *shape, dtype=dtype)
    expected = sum(breadcrumbs_reference(x.double().numpy(), keep, outliers, scope) for x in tau)
    assert_matches(run("breadcrumbs", tau, keep=keep, outliers=outliers, scope=scope).delta, np.asarray(expected), dtype)


def test_breadcrumbs_of_a_whole_model_with_conv1d_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"h.0.attn.c_attn.weight": (20, 24), "h.0.attn.c_attn.bias": (24,), "scale": ()}
    base = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    experts = {t: fine_tuned(base, i) for i, t in enumerate("abc")}
    merged = acemerge.merge_state_dicts(base, experts, method="breadcrumbs", config={"model_type": "gpt2"})
    for name in base:
        taus = [(e[name] - base[name]).double().numpy() for e in experts.values()]
        delta = np.asarray(sum(breadcrumbs_reference(np.asarray(x.T), 0.2, 0.1, "row").T for x in taus))
        np.testing.assert_allclose(merged[name].double().numpy(), base[name].double().numpy() + 0.4 * delta, atol=1e-6)


@given(
    seed=st.integers(0, 999), keep=st.sampled_from([0.1, 0.29, 0.5, 1.0]), outliers=st.sampled_from([0.0, 0.05, 0.3]),
    decimals=st.integers(1, 4),
)  # fmt: skip
def test_breadcrumbs_invariants(seed: int, keep: float, outliers: float, decimals: int) -> None:
    tau = random_tasks(1, 5, 17, seed=seed).round(decimals=decimals)  # with ties
    merged = run("breadcrumbs", tau, keep=keep, outliers=outliers).delta
    assert (merged.count_nonzero(1) <= exact_floor(17, keep)).all()
    removed = exact_floor(17, outliers)
    if removed:
        smallest_outlier = tau[0].abs().sort(dim=1, descending=True).values[:, removed - 1]
        assert (merged.abs().amax(1) <= smallest_outlier).all()
    assert ((merged == 0) | (merged == tau[0])).all()


def test_breadcrumbs_that_removes_nothing_is_task_arithmetic() -> None:
    tau = random_tasks(3, 6, 7)
    for scope in ("row", "tensor"):
        assert run("breadcrumbs", tau, keep=1, outliers=0, scope=scope).delta.equal(run("task_arithmetic", tau).delta)


def test_breadcrumbs_without_outliers_is_a_plain_top_k() -> None:
    """Where mergekit's empty slice zeroes the tensor."""
    tau = torch.tensor([[[5.0, -4.0, 3.0, 2.0, 1.0]]])
    for scope in ("row", "tensor"):
        for outliers in (0, 0.01):
            assert run("breadcrumbs", tau, keep=0.4, outliers=outliers, scope=scope).delta.tolist() == [[5, -4, 0, 0, 0]]


def test_breadcrumbs_with_all_kept_still_removes_outliers() -> None:
    tau = torch.tensor([[[5.0, -4.0, 3.0, 2.0, 1.0]]])
    assert run("breadcrumbs", tau, keep=1, outliers=0.2).delta.tolist() == [[0, -4, 3, 2, 1]]


def test_breadcrumbs_warns_when_rows_are_too_short_to_keep_anything() -> None:
    merged = run("breadcrumbs", random_tasks(2, 6, 4), keep=0.2)
    assert not merged.delta.any()
    assert merged.warnings == ("keep=0.2 of 4 entries along the last axis is less than one: it stays at the base",)
    assert run("breadcrumbs", random_tasks(2, 6, 4), keep=0.2, scope="tensor").warnings == ()
    assert run("breadcrumbs", random_tasks(2), keep=0.2).warnings == ()


# ----------------------------------------------------------------------------------------------------------- common

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
