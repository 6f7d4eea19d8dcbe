"""Consensus TA, NAN and FR against plain float64 transcriptions of their formulas, and what each must keep to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import acemerge
from acemerge.methods import Context, Merged, get_method
from acemerge.methods.fr import high_pass
from small_models import base_tensors, fine_tuned

Array = np.ndarray[Any, np.dtype[np.float64]]
SHAPES = [(12, 8), (3, 20), (5,), (), (2, 3, 2, 2)]
PRECISIONS = {torch.float32: 1e-4, torch.float64: 1e-9}


def random_task_vectors(*shape: int, tasks: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(tasks)]).view(-1, *[1] * len(shape))
    return (torch.randn(tasks, *shape, generator=generator) * strengths).to(dtype)


def run(method: str, task_vectors: Tensor, base: Tensor | None = None, **options: Any) -> Merged:
    chosen = get_method(method)
    names = tuple(f"e{t}" for t in range(len(task_vectors)))
    return chosen(task_vectors, chosen.options(options), Context("layer.weight", names, base))


def assert_relative(found: Tensor, expected: Array | Tensor, tolerance: float, size: Tensor | None = None) -> None:
    """Within a share of the expected value's size, or of the size given where what is added may cancel."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    error, size = (found.double() - wanted).norm(), wanted.norm() if size is None else size
    assert error <= tolerance * size, f"off by {error / size:.3g} of its size"


def whole_model(experts: int = 3) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    base = base_tensors()
    return base, {f"e{i}": fine_tuned(base, i, strength=0.03 * (1 + i)) for i in range(experts)}


def weights_of(base: dict[str, Tensor]) -> list[str]:
    return [name for name, weight in base.items() if weight.is_floating_point()]


def flattened(base: dict[str, Tensor], experts: dict[str, dict[str, Tensor]]) -> Array:
    """Each expert's task vector of the whole model, float32 differences as the engine takes them."""
    names = weights_of(base)
    rows = [torch.cat([(expert[name] - base[name]).reshape(-1) for name in names]) for expert in experts.values()]
    return torch.stack(rows).double().numpy()


def unflattened(flat: Array, base: dict[str, Tensor]) -> dict[str, Tensor]:
    sizes = [base[name].numel() for name in weights_of(base)]
    pieces = torch.split(torch.from_numpy(flat), sizes)
    return {name: piece.reshape(base[name].shape) for name, piece in zip(weights_of(base), pieces, strict=True)}


def assert_merges_to(base: dict[str, Tensor], merged: dict[str, Tensor], change: Array, tolerance: float = 1e-5) -> None:
    for name, expected in unflattened(change, base).items():
        error = (merged[name].double() - base[name].double() - expected).abs().max()
        rounding = torch.finfo(torch.float32).eps * base[name].abs().max()
        assert error <= tolerance * abs(change).max() + rounding, name


# --- consensus_ta ------------------------------------------------------------------------------------------------------


def reference_masks(taus: Array, tau_M: Array, lam: float) -> Array:
    masks = np.zeros_like(taus, dtype=bool)
    for t in range(len(taus)):
        for index in np.ndindex(tau_M.shape):
            tau = taus[(t, *index)]
            masks[(t, *index)] = abs(tau) > lam * abs(tau_M[index] - tau)
    return masks


def reference_ties_sum(flat: Array, keep: float) -> Array:
    """TIES with the sum of what agrees, on whole flattened task vectors."""
    trimmed = flat.copy()
    for u in trimmed:
        cut = np.sort(np.abs(u))[len(u) - math.floor(len(u) * keep) - 1] if keep < 1 else 0.0
        u[np.abs(u) < cut] = 0
    signs = np.sign(trimmed.sum(0))
    signs[signs == 0] = 1 if signs.sum() > 0 else -1
    return np.asarray(np.where(np.sign(trimmed) == signs, trimmed, 0).sum(0))


def reference_consensus(taus: Array, lam: float = 0.4, k: int = 2, tau_M: Array | None = None) -> Array:
    tau_M = taus.sum(0) if tau_M is None else tau_M
    return np.asarray(tau_M * (reference_masks(taus, tau_M, lam).sum(0) >= k))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tasks", "lam", "k"), [(2, 0.4, 2), (5, 0.2, 3), (8, 0.6, 1)])
def test_consensus_formula(dtype: torch.dtype, shape: tuple[int, ...], tasks: int, lam: float, k: int) -> None:
    task_vectors = random_task_vectors(*shape, tasks=tasks, dtype=dtype)
    found = run("consensus_ta", task_vectors, mask_lambda=lam, k=k, alpha=1.0)
    assert_relative(found.delta, reference_consensus(task_vectors.double().numpy(), lam, k), PRECISIONS[dtype])


def test_consensus_defaults() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4)
    assert_relative(run("consensus_ta", task_vectors).delta, 0.3 * reference_consensus(task_vectors.numpy()), 1e-12)


@pytest.mark.parametrize("keep", [0.2, 0.5, 1.0])
def test_consensus_ties_formula(keep: float) -> None:
    base, experts = whole_model(4)
    taus = flattened(base, experts)
    merged = acemerge.merge_state_dicts(base, experts, method="consensus_ta", merge="ties", keep=keep, alpha=1.0)
    assert_merges_to(base, merged, reference_consensus(taus, tau_M=reference_ties_sum(taus, keep)))


def test_consensus_of_a_whole_model() -> None:
    base, experts = whole_model(4)
    merged = acemerge.merge_state_dicts(base, experts, method="consensus_ta", alpha=1.0)
    assert_merges_to(base, merged, reference_consensus(flattened(base, experts)))


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 5), st.floats(0, 2))
def test_consensus_is_a_restriction_of_the_sum(seed: int, tasks: int, k: int, lam: float) -> None:
    task_vectors = random_task_vectors(6, 5, tasks=tasks, seed=seed)
    total = task_vectors.sum(0)
    found = run("consensus_ta", task_vectors, k=k, mask_lambda=lam, alpha=1.0).delta
    torch.testing.assert_close(found, torch.where(found == 0, 0.0, total))


def test_consensus_raising_k_never_adds_entries() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=5)
    supports = [run("consensus_ta", task_vectors, k=k).delta != 0 for k in range(6)]
    assert all(bool((more | ~fewer).all()) for more, fewer in itertools.pairwise(supports))
    assert supports[1].sum() > supports[3].sum()


def test_consensus_k_0_is_task_arithmetic() -> None:
    task_vectors = random_task_vectors(12, 8)
    task_arithmetic = acemerge.merge_task_vectors(task_vectors, method="task_arithmetic")
    torch.testing.assert_close(run("consensus_ta", task_vectors, k=0).delta, task_arithmetic)


@pytest.mark.parametrize("lam", [0.2, 1.0, 50.0])
def test_consensus_masks_of_disjoint_supports_are_the_supports(lam: float) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=2, dtype=torch.float32)
    task_vectors[0, :6] = 0
    task_vectors[1, 6:] = 0
    assert run("consensus_ta", task_vectors, k=1, mask_lambda=lam, alpha=1.0).delta.equal(task_vectors.sum(0).double())
    assert not run("consensus_ta", task_vectors, k=2, mask_lambda=lam).delta.any()


@pytest.mark.parametrize(("lam", "kept"), [(0.4, True), (0.5, False), (0.6, False)])
def test_consensus_of_three_copies(lam: float, kept: bool) -> None:
    """T tau while lambda (T - 1) < 1, exactly: float32 copies must not decide by how 3 tau is rounded."""
    task_vectors = random_task_vectors(30, 20, tasks=1, dtype=torch.float32).expand(3, 30, 20)
    found = run("consensus_ta", task_vectors, mask_lambda=lam, alpha=1.0).delta
    assert found.equal(3 * task_vectors[0].double() if kept else torch.zeros(30, 20, dtype=torch.float64))


def test_consensus_order_and_size() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4, dtype=torch.float32)
    found = run("consensus_ta", task_vectors).delta
    torch.testing.assert_close(run("consensus_ta", task_vectors[[2, 0, 3, 1]]).delta, found, rtol=1e-12, atol=0)
    torch.testing.assert_close(run("consensus_ta", task_vectors * 4).delta, found * 4, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tasks", [1, 2])
def test_consensus_k_above_the_number_of_experts_is_lowered_with_a_warning(tasks: int) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=tasks)
    found = run("consensus_ta", task_vectors, k=3, alpha=1.0)
    assert_relative(found.delta, reference_consensus(task_vectors.numpy(), k=tasks), 1e-12)
    assert found.warnings == (f"k=3 is more than its {tasks} expert(s): k={tasks} is used",)
    assert not run("consensus_ta", task_vectors, k=tasks).warnings


def test_consensus_of_one_expert_is_that_expert() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1)
    assert run("consensus_ta", task_vectors, alpha=1.0).delta.equal(task_vectors[0])


def test_consensus_frozen_experts() -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    assert_relative(run("consensus_ta", task_vectors).delta, 0.3 * reference_consensus(task_vectors.numpy()), 1e-12)
    assert not run("consensus_ta", torch.zeros(3, 4, 5)).delta.any()
    assert not run("consensus_ta", torch.zeros(3, 4, 5), merge="ties").delta.any()


# --- nan ---------------------------------------------------------------------------------------------------------------


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


# --- fr ----------------------------------------------------------------------------------------------------------------


def reference_filter(tau: Array, rho: float) -> Array:
    H, W = tau.shape
    F = np.fft.fft2(tau)
    for y in range(H):
        for x in range(W):
            if math.sqrt((y - H // 2) ** 2 + (x - W // 2) ** 2) > rho:
                F[y, x] = 0
    return np.asarray(np.real(np.fft.ifft2(F)))


def reference_fr(taus: Array, c: float = 0.7, side: str = "min", align: bool = True) -> Array:
    H, W = taus[0].shape
    filtered = [reference_filter(tau, c * (min(H, W) if side == "min" else max(H, W))) for tau in taus]
    if align:
        largest = max(np.abs(f).mean() for f in filtered)
        filtered = [f * largest / np.abs(f).mean() for f in filtered]
    return np.asarray(sum(filtered))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", [(12, 8), (10, 10), (7, 12), (9, 9), (4, 40)])
@pytest.mark.parametrize(
    ("c", "side", "align"), [(0.7, "min", True), (0.5, "min", False), (0.6, "max", True), (0.3, "max", False)]
)
def test_fr_formula(dtype: torch.dtype, shape: tuple[int, int], c: float, side: str, align: bool) -> None:
    task_vectors = random_task_vectors(*shape, tasks=4, dtype=dtype)
    found = run("fr", task_vectors, cutoff=c, side=side, align=align, alpha=1.0)
    assert_relative(found.delta, reference_fr(task_vectors.double().numpy(), c, side, align), PRECISIONS[dtype])


def test_fr_defaults() -> None:
    task_vectors = random_task_vectors(12, 8)
    assert_relative(run("fr", task_vectors).delta, 0.7 * reference_fr(task_vectors.numpy()), 1e-12)


def test_fr_cutoff_is_taken_as_written() -> None:
    """0.7 * 90 is 62.999... in floating point; the frequency at distance 63 is kept."""
    filter_ = high_pass(90, 128, 0.7 * 90, torch.device("cpu"))
    assert filter_.gains[45, 1] == 1
    assert filter_.gains[45, 0] == 0


def test_fr_with_a_large_radius_is_task_arithmetic() -> None:
    task_vectors = random_task_vectors(9, 12)
    found = run("fr", task_vectors, cutoff=1.0, align=False, alpha=0.3).delta
    torch.testing.assert_close(found, acemerge.merge_task_vectors(task_vectors, method="task_arithmetic"))


@given(st.integers(2, 9), st.integers(2, 9), st.floats(0.05, 1.5), st.integers(0, 1000))
def test_fr_filter_is_linear_and_never_adds_energy(rows: int, columns: int, c: float, seed: int) -> None:
    a, b = random_task_vectors(rows, columns, tasks=2, seed=seed)
    filter_ = high_pass(rows, columns, c * min(rows, columns), torch.device("cpu"))
    torch.testing.assert_close(filter_(2 * a - 3 * b), 2 * filter_(a) - 3 * filter_(b))
    assert filter_(a).norm() <= a.norm() * (1 + 1e-12)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.05, 1.5), st.integers(0, 1000))
def test_fr_filter_is_idempotent_for_even_sizes(half_rows: int, half_columns: int, c: float, seed: int) -> None:
    rows, columns = 2 * half_rows, 2 * half_columns
    a = random_task_vectors(rows, columns, tasks=1, seed=seed)[0]
    filter_ = high_pass(rows, columns, c * min(rows, columns), torch.device("cpu"))
    torch.testing.assert_close(filter_(filter_(a)), filter_(a), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("align", [True, False])
def test_fr_maps_constants_to_zero(align: bool) -> None:
    """And does not enlarge what rounding leaves of them when it aligns."""
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0.37
    others = run("fr", task_vectors[[0, 2]], align=align).delta
    torch.testing.assert_close(run("fr", task_vectors, align=align).delta, others, rtol=1e-10, atol=1e-12)
    assert run("fr", torch.full((2, 12, 8), 0.37, dtype=torch.float64), align=align).delta.abs().max() < 1e-15


def test_fr_is_transpose_equivariant() -> None:
    task_vectors = random_task_vectors(7, 12)
    torch.testing.assert_close(run("fr", task_vectors.mT.contiguous()).delta, run("fr", task_vectors).delta.T)


def test_fr_order_size_and_copies() -> None:
    task_vectors = random_task_vectors(12, 8)
    found = run("fr", task_vectors).delta
    torch.testing.assert_close(run("fr", task_vectors[[2, 0, 1]]).delta, found)
    torch.testing.assert_close(run("fr", task_vectors * 4).delta, found * 4)
    torch.testing.assert_close(run("fr", task_vectors[[1, 1, 1]]).delta, 3 * run("fr", task_vectors[[1]]).delta)


def test_fr_alignment_gives_every_expert_the_same_mean_magnitude() -> None:
    task_vectors = random_task_vectors(12, 8)
    alone = [run("fr", task_vectors[[t]], align=False, alpha=1.0).delta for t in range(3)]
    largest = max(float(one.abs().mean()) for one in alone)
    expected = sum(one * largest / one.abs().mean() for one in alone)
    torch.testing.assert_close(run("fr", task_vectors, alpha=1.0).delta, expected)


def test_fr_frozen_experts() -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    torch.testing.assert_close(run("fr", task_vectors).delta, run("fr", task_vectors[[0, 2]]).delta)
    assert not run("fr", torch.zeros(3, 4, 5)).delta.any()


def test_fr_cuts_by_shape() -> None:
    """What the docs say of it."""
    cut = {s: 1 - high_pass(*s, 0.7 * 768, torch.device("cpu")).kept for s in [(768, 768), (2304, 768), (3072, 768)]}
    assert round(cut[768, 768], 4) == 0.0002
    assert round(cut[2304, 768], 2) == 0.58
    assert round(cut[3072, 768], 2) == 0.68


def test_fr_leaves_what_is_not_a_matrix_at_the_base() -> None:
    base, experts = whole_model(3)
    merged = acemerge.merge_state_dicts(base, experts, method="fr")
    for name in ("layers.0.bias", "scale", "embed.weight"):
        assert merged[name].equal(base[name])
    taus = torch.stack([expert["layers.0.weight"] - base["layers.0.weight"] for expert in experts.values()]).double().numpy()
    assert_relative(merged["layers.0.weight"].double() - base["layers.0.weight"].double(), 0.7 * reference_fr(taus), 1e-5)


# --- all ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["consensus_ta", "nan", "fr"])
@pytest.mark.parametrize("tasks", [1, 9])
def test_finite_and_repeatable_for_rank_one_and_many_experts(method: str, tasks: int) -> None:
    task_vectors = random_task_vectors(4, 1, tasks=tasks, dtype=torch.float32) @ random_task_vectors(1, 3, tasks=tasks).float()
    before = task_vectors.clone()
    found = run(method, task_vectors).delta
    assert torch.isfinite(found).all()
    assert found.equal(run(method, task_vectors).delta)
    assert task_vectors.equal(before)
