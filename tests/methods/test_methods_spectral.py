"""Methods built on singular vectors and Gram matrices: agreement with plain float64 transcriptions, and what follows from them.

Every reference below forms full SVDs, explicit Gram matrices and one term per expert, so that each line can be read against the
formula. Singular vectors are never compared: products, singular values and spans are.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from acemerge import merge_state_dicts, merge_task_vectors
from acemerge.errors import InputError
from acemerge.methods import Context, Merged, get_method
from acemerge.methods.core_space import core_of
from acemerge.methods.knots_ties import KnotsTiesOptions, align
from acemerge.methods.tsv_m import orthogonalise
from acemerge.numerics import linalg
from acemerge.numerics.covariance import Experts
from acemerge.numerics.frame import standard_frame

Array = NDArray[np.float64]
SHAPES = {"square": (12, 12), "wide": (8, 18), "very wide": (4, 40), "tall": (20, 9)}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
SPECTRAL = ("cart", "tsv_m", "iso_c", "iso_cts", "wudi", "actmat", "knots_ties", "core_space")
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def experts(tasks: int, rows: int, cols: int, *, decay: float = 0.5, seed: int = 0) -> Tensor:
    """Task vectors of different length, whose rows share an input covariance with singular values i^-decay."""
    basis = rotation(cols, seed)
    spectrum = torch.arange(1, cols + 1, dtype=torch.float64) ** -decay
    lengths = torch.tensor([0.02 * 1.4**t for t in range(tasks)], dtype=torch.float64)
    vectors: Tensor = gaussian(tasks, rows, cols, seed=seed + 1) @ (basis * spectrum) @ basis.T
    return vectors * lengths[:, None, None]


def low_rank(tasks: int, rows: int, cols: int, rank: int, *, seed: int = 0) -> Tensor:
    """LoRA-like task vectors B_t A_t on a dyadic grid: exactly of that rank in float32 too."""
    B = torch.randint(-8, 9, (tasks, rows, rank), generator=generator(seed)).double()
    A = torch.randint(-8, 9, (tasks, rank, cols), generator=generator(seed + 1)).double()
    return B @ A * torch.tensor([2.0 ** -(8 + t % 3) for t in range(tasks)], dtype=torch.float64)[:, None, None]


def orthogonal_row_spaces(tasks: int, rows: int, cols: int, rank: int) -> Tensor:
    frame = torch.linalg.qr(gaussian(cols, cols, seed=5)).Q
    return torch.stack([gaussian(rows, rank, seed=t) @ frame[:, t * rank : (t + 1) * rank].T for t in range(tasks)])


def rotation(size: int, seed: int) -> Tensor:
    Q: Tensor = torch.linalg.qr(gaussian(size, size, seed=seed)).Q
    return Q


def run(name: str, task_vectors: Tensor, **options: Any) -> Merged:
    method = get_method(name)
    return method(task_vectors, method.options({"alpha": 1.0, **options}).resolve({}))


def merge(name: str, task_vectors: Tensor, **options: Any) -> Tensor:
    return merge_task_vectors(task_vectors, method=name, **{"alpha": 1.0, **options})


def error(actual: Tensor, expected: Tensor | Array) -> float:
    """The relative Frobenius error."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return float(torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected))


def check(name: str, task_vectors: Tensor, reference: Callable[..., Array], **options: Any) -> None:
    """Compare with the transcription on the very numbers given to the merge, in both precisions."""
    for dtype, tolerance in TOLERANCE.items():
        given_vectors = task_vectors.to(dtype)
        actual = merge(name, given_vectors, **options)
        assert actual.dtype == dtype
        assert error(actual, reference(given_vectors.double().numpy(), **options)) <= tolerance


# Transcriptions


def truncated(matrix: Array, k: int) -> Array:
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray((u[:, :k] * s[:k]) @ vh[:k])


def polar(matrix: Array) -> Array:
    u, _, vh = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vh)


def reference_cart(tau: Array, *, scale: float = 2.0, rank: float = 0.12) -> Array:
    T, m, n = tau.shape
    A = sum(tau[t] for t in range(T)) / T
    k = max(1, math.floor(rank * min(m, n) + 1e-9)) if rank > 0 else 0
    return np.asarray(A + scale * sum(truncated(tau[t] - A, k) for t in range(T)))


def reference_tsv_m(tau: Array) -> Array:
    T, m, n = tau.shape
    k = min(m, n) // T
    factors = [np.linalg.svd(tau[t], full_matrices=False) for t in range(T)]
    X = np.concatenate([u[:, :k] for u, _, _ in factors], axis=1)
    sigma = np.concatenate([s[:k] for _, s, _ in factors])
    Y = np.concatenate([vh[:k] for _, _, vh in factors], axis=0)
    return np.asarray(polar(X) @ np.diag(sigma) @ polar(Y))


def reference_iso_c(tau: Array) -> Array:
    u, s, vh = np.linalg.svd(tau.sum(0), full_matrices=False)
    return np.asarray(s.mean() * u @ vh)


def reference_iso_cts(tau: Array, *, common: float = 0.8) -> Array:
    T, m, n = tau.shape
    r = min(m, n)
    q = round((r - math.floor(common * r + 1e-9)) / T)
    k = r - q * T
    u, s, vh = np.linalg.svd(tau.sum(0), full_matrices=False)
    own = [np.linalg.svd(tau[t] - u[:, :k] @ u[:, :k].T @ tau[t], full_matrices=False) for t in range(T)]
    X = np.concatenate([*(u_t[:, :q] for u_t, _, _ in own), u[:, :k]], axis=1)
    sigma = np.concatenate([*(s_t[:q] for _, s_t, _ in own), s[:k]])
    Y = np.concatenate([*(vh_t[:q] for _, _, vh_t in own), vh[:k]], axis=0)
    return np.asarray(sigma.mean() * polar(X) @ polar(Y))


def closed_form(tau: Array, weights: list[float], rtol: float | None) -> Array:
    T, _, n = tau.shape
    G = [tau[t].T @ tau[t] for t in range(T)]
    N = sum(weights[t] * tau[t] @ G[t] for t in range(T))
    S = sum(weights[t] * G[t] for t in range(T))
    return np.asarray(N @ np.linalg.pinv(S, rcond=n * 2.0**-23 if rtol is None else rtol, hermitian=True))


def reference_actmat(tau: Array, *, rtol: float | None = None) -> Array:
    return closed_form(tau, [1.0] * len(tau), rtol)


def reference_wudi_closed(tau: Array, *, mode: str = "closed_form", rtol: float | None = None) -> Array:
    return closed_form(tau, [1 / float(np.sum(delta**2)) for delta in tau], rtol)


def wudi_loss(M: Tensor, tau: Tensor) -> Tensor:
    return torch.stack([(((M - delta) @ delta.T) ** 2).sum() / (delta**2).sum() for delta in tau]).sum()


def reference_wudi(tau: Array, *, steps: int = 300, lr: float = 1e-5) -> Array:
    """Automatic differentiation of the loss and torch's own Adam."""
    vectors = torch.from_numpy(tau)
    M = vectors.sum(0).clone().requires_grad_(True)
    adam = torch.optim.Adam([M], lr=lr, weight_decay=0)
    for _ in range(steps):
        adam.zero_grad()
        wudi_loss(M, vectors).backward()
        adam.step()
    return np.asarray(M.detach().numpy())


def reference_ties(vectors: list[Array], keep: float, how: str) -> list[Array]:
    """TIES over several tensors' [task, ...] arrays with one threshold per task; the merged arrays."""
    T = len(vectors[0])
    flat = np.stack([np.concatenate([v[t].ravel() for v in vectors]) for t in range(T)])
    d = flat.shape[1]
    if keep < 1:
        rank = max(1, d - math.floor(d * keep + 1e-9))
        cuts = [np.sort(np.abs(flat[t]).astype(np.float32))[rank - 1] for t in range(T)]
        flat = np.stack([np.where(np.abs(flat[t]).astype(np.float32) >= cuts[t], flat[t], 0.0) for t in range(T)])
    sign = np.sign(flat.sum(0))
    sign = np.where(sign == 0, 1.0 if sign.sum() > 0 else -1.0, sign)
    merged = np.zeros(d)
    for j in range(d):
        agreeing = [flat[t, j] for t in range(T) if flat[t, j] * sign[j] > 0]
        merged[j] = sum(agreeing) / (max(1, len(agreeing)) if how == "mean" else 1)
    sizes = np.cumsum([v[0].size for v in vectors])[:-1]
    return [part.reshape(v[0].shape) for part, v in zip(np.split(merged, sizes), vectors, strict=True)]


def reference_knots(
    tensors: list[Array],
    *,
    keep: float = 0.2,
    merge: str = "mean",
    shared: str = "output",
    spectrum: str = "before",
    cut: float = 1e-5,
    drop: Callable[[int, int, Array], Array] = lambda index, t, Z: Z,
) -> list[Array]:
    bases, coordinates = [], []
    for index, tau in enumerate(tensors):
        side = tau if shared == "output" else tau.transpose(0, 2, 1)
        u, s, vh = np.linalg.svd(np.concatenate(list(side), axis=1), full_matrices=False)
        p = max(1, int(np.sum(s > cut)))
        V = np.split(vh[:p], len(side), axis=1)
        bases.append(u[:, :p] if spectrum == "before" else u[:, :p] * s[:p])
        Z = np.stack([s[:p, None] * V_t if spectrum == "before" else V_t for V_t in V])
        coordinates.append(np.stack([drop(index, t, Z[t]) for t in range(len(Z))]))
    merged = [u @ z for u, z in zip(bases, reference_ties(coordinates, keep, merge), strict=True)]
    return merged if shared == "output" else [M.T for M in merged]


def reference_core(tau: Array) -> tuple[Array, Array, Array]:
    """U_B, V_A and the cores, from balanced factors B_t A_t."""
    factors = [np.linalg.svd(delta, full_matrices=False) for delta in tau]
    ranks = [int(np.sum(s > 1e-6 * s[0])) if s[0] > 0 else 0 for _, s, _ in factors]
    B = np.concatenate([u[:, :r] * np.sqrt(s[:r]) for (u, s, _), r in zip(factors, ranks, strict=True)], axis=1)
    A = np.concatenate([np.sqrt(s[:r])[:, None] * vh[:r] for (_, s, vh), r in zip(factors, ranks, strict=True)], axis=0)
    u, s, _ = np.linalg.svd(B, full_matrices=False)
    U = u[:, s > 1e-6 * s[0]]
    _, s, vh = np.linalg.svd(A, full_matrices=False)
    V = vh[s > 1e-6 * s[0]].T
    return U, V, np.stack([U.T @ delta @ V for delta in tau])


# What all of them have in common


@pytest.mark.parametrize("name", ["cart", "tsv_m", "iso_c", "iso_cts", "actmat", "wudi", "core_space"])
@given(order=st.permutations(range(4)), shape=st.sampled_from(sorted(SHAPES)))
def test_order_of_experts_does_not_matter(name: str, order: list[int], shape: str) -> None:
    task_vectors = experts(4, *SHAPES[shape])
    options = {"steps": 5} if name == "wudi" else {}
    assert error(merge(name, task_vectors[order], **options), merge(name, task_vectors, **options)) <= 1e-9


@pytest.mark.parametrize("mode", ["cart", "tsv_m", "iso_c", "iso_cts", "actmat", "wudi", "core_space"])
@given(scale=st.floats(1e-3, 1e3), shape=st.sampled_from(sorted(SHAPES)))
def test_longer_task_vectors_give_a_longer_merge(mode: str, scale: float, shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape])
    options = {"mode": "closed_form"} if mode == "wudi" else {}
    assert error(merge(mode, scale * task_vectors, **options), scale * merge(mode, task_vectors, **options)) <= 1e-9


@pytest.mark.parametrize("name", ["cart", "tsv_m", "iso_c", "iso_cts", "actmat", "wudi", "core_space"])
@given(seed=st.integers(0, 10_000), shape=st.sampled_from(sorted(SHAPES)))
def test_rotating_outputs_and_inputs_rotates_the_merge(name: str, seed: int, shape: str) -> None:
    rows, cols = SHAPES[shape]
    Q, R = rotation(rows, seed), rotation(cols, seed + 1)
    task_vectors = experts(3, rows, cols)
    options = {"mode": "closed_form"} if name == "wudi" else {}
    assert error(merge(name, Q @ task_vectors @ R, **options), Q @ merge(name, task_vectors, **options) @ R) <= 1e-8


@pytest.mark.parametrize("name", ["cart", "tsv_m", "iso_c"])
@every_shape
def test_rows_and_columns_are_alike(name: str, shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    assert error(merge(name, task_vectors.mT.contiguous()).T, merge(name, task_vectors)) <= 1e-9


@pytest.mark.parametrize("name", ["iso_cts", "actmat", "wudi", "knots_ties"])
def test_rows_and_columns_are_not_alike(name: str) -> None:
    task_vectors = experts(3, 12, 12)
    options = {"mode": "closed_form"} if name == "wudi" else {}
    assert error(merge(name, task_vectors.mT.contiguous(), **options).T, merge(name, task_vectors, **options)) > 1e-3


@pytest.mark.parametrize("name", SPECTRAL)
@every_shape
def test_float64_inputs_are_untouched_and_results_are_new_and_reproducible(name: str, shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    before = task_vectors.clone()
    first, second = merge(name, task_vectors), merge(name, task_vectors)
    assert task_vectors.equal(before)
    assert first.equal(second)
    assert first.untyped_storage().data_ptr() != task_vectors.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["tsv_m", "iso_c", "iso_cts", "wudi", "actmat", "core_space"])
@pytest.mark.parametrize("position", [0, 2])
def test_an_expert_that_changed_nothing_is_left_out(name: str, position: int) -> None:
    others = experts(3, 10, 14)
    with_zero = torch.cat((others[:position], torch.zeros_like(others[:1]), others[position:]))
    assert error(merge(name, with_zero), merge(name, others)) <= 1e-12


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("tasks", [1, 3])
def test_nothing_changed_gives_exactly_nothing(name: str, tasks: int) -> None:
    merged = run(name, torch.zeros(tasks, 6, 9))
    assert not merged.delta.any()
    assert merged.warnings == ()


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("shape", [(2, 2), (2, 30), (30, 2), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_very_thin_matrices_are_finite(name: str, shape: tuple[int, int], tasks: int) -> None:
    merged = run(name, experts(tasks, *shape).float())
    assert merged.delta.shape == shape
    assert torch.isfinite(merged.delta).all()


@pytest.mark.parametrize("name", SPECTRAL)
def test_plan_estimates_are_positive(name: str) -> None:
    method = get_method(name)
    for shape in ((1, 2, 2), (8, 768, 3072), (20, 3072, 768), (3, 4, 4096)):
        assert method.flops(*shape) > 0
        assert method.float64_elements(*shape) > shape[1] * shape[2]


# CART


@pytest.mark.parametrize("rank", [0.12, 0.29, 0.5, 1.0])
@pytest.mark.parametrize("tasks", [1, 3, 5])
@every_shape
def test_cart_agrees(shape: tuple[int, int], tasks: int, rank: float) -> None:
    check("cart", experts(tasks, *shape), reference_cart, rank=rank)


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_cart_agrees_for_scales_and_defaults(scale: float) -> None:
    check("cart", experts(4, 30, 25), reference_cart, scale=scale)
    check("cart", experts(4, 30, 25), reference_cart)


def test_cart_floors_the_share_as_written() -> None:
    task_vectors = gaussian(3, 100, 100)
    assert run("cart", task_vectors, rank=0.29).facts["residual_rank"] == 29  # 0.29 * 100 is 28.999999999999996
    assert run("cart", task_vectors, rank=1e-9).facts["residual_rank"] == 1


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"rank": 0.0}, {"rank": 1.0}, {"rank": 1.0, "scale": 50.0}])
def test_cart_is_averaging_without_or_with_whole_residuals(options: dict[str, float]) -> None:
    task_vectors = experts(4, 9, 12)
    assert error(merge("cart", task_vectors, **options), task_vectors.mean(0)) <= 1e-12


@given(rank=st.floats(0, 1), scale=st.floats(0, 10))
def test_cart_of_two_experts_is_averaging(rank: float, scale: float) -> None:
    task_vectors = experts(2, 9, 12)
    assert error(merge("cart", task_vectors, rank=rank, scale=scale), task_vectors.mean(0)) <= 1e-9


@pytest.mark.parametrize("copies", [1, 3])
def test_cart_of_one_expert_or_its_copies_is_that_expert(copies: int) -> None:
    task_vectors = experts(1, 9, 12).repeat(copies, 1, 1)
    assert error(merge("cart", task_vectors), task_vectors[0]) <= 1e-12


def test_cart_adds_a_residual_of_bounded_rank() -> None:
    task_vectors = experts(3, 40, 50)
    residual = merge("cart", task_vectors, rank=0.1) - task_vectors.mean(0)
    assert torch.linalg.matrix_rank(residual, rtol=1e-9) == 3 * 4


def test_cart_counts_an_expert_that_changed_nothing() -> None:
    task_vectors = experts(3, 9, 12)
    task_vectors[1] = 0
    check("cart", task_vectors, reference_cart)


# TSV-M


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 3, 4])
@every_shape
def test_tsv_m_agrees(shape: tuple[int, int], tasks: int, decay: float) -> None:
    check("tsv_m", experts(tasks, *shape, decay=decay), reference_tsv_m)


def test_tsv_m_agrees_at_a_larger_size() -> None:
    check("tsv_m", experts(5, 64, 96, decay=1.0), reference_tsv_m)


@every_shape
def test_tsv_m_of_one_expert_is_that_expert(shape: tuple[int, int]) -> None:
    task_vectors = experts(1, *shape)
    assert error(merge("tsv_m", task_vectors), task_vectors[0]) <= 1e-12


@every_shape
def test_tsv_m_has_the_kept_singular_values(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    k = min(shape) // 3
    kept = torch.linalg.svdvals(task_vectors)[:, :k].flatten().sort(descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(merge("tsv_m", task_vectors))[: 3 * k], kept)


def test_orthogonalised_directions_are_orthonormal() -> None:
    directions = [linalg.leading_directions(delta, 4) for delta in experts(3, 20, 13)]
    together = orthogonalise(directions)
    assert torch.dist(together.left.T @ together.left, torch.eye(12, dtype=torch.float64)) <= 1e-10
    assert torch.dist(together.right.T @ together.right, torch.eye(12, dtype=torch.float64)) <= 1e-10
    assert together.warnings == ()


def test_tsv_m_of_experts_that_do_not_interfere_is_the_sum_of_their_truncations() -> None:
    Q, R = rotation(12, 1), rotation(15, 2)
    blocks = [Q[:, 4 * t : 4 * t + 4] @ gaussian(4, 5, seed=t) @ R[:, 5 * t : 5 * t + 5].T for t in range(3)]
    expected = sum(truncated(block.numpy(), 4) for block in blocks)
    assert error(merge("tsv_m", torch.stack(blocks)), np.asarray(expected)) <= 1e-9


def test_tsv_m_of_more_experts_than_directions_leaves_the_base() -> None:
    merged = run("tsv_m", experts(5, 4, 30))
    assert not merged.delta.any()
    assert "stays at the base" in merged.warnings[0]


@pytest.mark.parametrize("copies", [2, 3])
def test_tsv_m_of_copies_is_their_common_truncation_and_says_so(copies: int) -> None:
    one = experts(1, 14, 12)
    merged = run("tsv_m", one.repeat(copies, 1, 1))
    assert error(merged.delta, truncated(one[0].numpy(), 12 // copies)) <= 1e-9
    assert "share leading directions" in merged.warnings[0]


def test_tsv_m_does_not_amplify_rounding_between_copies() -> None:
    one = experts(1, 40, 32, decay=0.2).float()
    noisy = torch.cat((one, one * (1 + 1e-7 * torch.randn(40, 32, generator=generator(3)))))
    merged = run("tsv_m", noisy)
    assert error(merged.delta, truncated(one[0].double().numpy(), 16)) <= 1e-4
    assert "share leading directions" in merged.warnings[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tsv_m_of_low_rank_experts_uses_only_the_directions_they_have(dtype: torch.dtype) -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    factors = [np.linalg.svd(delta, full_matrices=False) for delta in task_vectors.numpy()]
    X = np.concatenate([u[:, :2] for u, _, _ in factors], axis=1)
    Y = np.concatenate([vh[:2] for _, _, vh in factors], axis=0)
    expected = polar(X) @ np.diag(np.concatenate([s[:2] for _, s, _ in factors])) @ polar(Y)
    merged = run("tsv_m", task_vectors.to(dtype))
    assert error(merged.delta, expected) <= TOLERANCE[dtype]
    assert "3 of 3 experts have rank below 8" in merged.warnings[0]


# Iso-C


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 5])
@every_shape
def test_iso_c_agrees(shape: tuple[int, int], tasks: int, decay: float) -> None:
    check("iso_c", experts(tasks, *shape, decay=decay), reference_iso_c)


def test_iso_c_agrees_on_a_steep_spectrum() -> None:
    """Weak directions get the same weight as strong ones: they have to be right too."""
    total = rotation(20, 1) @ torch.diag(10.0 ** -torch.linspace(0, 6, 20, dtype=torch.float64)) @ rotation(20, 2)
    assert error(merge("iso_c", total[None]), reference_iso_c(total[None].numpy())) <= 1e-7


@every_shape
def test_iso_c_flattens_the_spectrum_and_keeps_its_sum(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    before, after = (torch.linalg.svdvals(x) for x in (task_vectors.sum(0), merge("iso_c", task_vectors)))
    torch.testing.assert_close(after, before.mean().expand_as(after))
    assert float(after.sum()) == pytest.approx(float(before.sum()))


def test_iso_c_is_the_polar_factor_of_the_sum() -> None:
    task_vectors = experts(3, 14, 12)
    product = merge("iso_c", task_vectors).T @ task_vectors.sum(0)
    torch.testing.assert_close(product, product.T)
    assert torch.linalg.eigvalsh(product).min() > 0


def test_iso_c_of_one_expert_is_not_that_expert() -> None:
    task_vectors = experts(1, 14, 12)
    assert error(merge("iso_c", task_vectors), task_vectors[0]) > 0.1


def test_iso_c_of_copies_is_the_flattened_multiple() -> None:
    one = experts(1, 14, 12)
    assert error(merge("iso_c", one.repeat(3, 1, 1)), 3 * merge("iso_c", one)) <= 1e-12


def test_iso_c_of_opposite_experts_is_nothing() -> None:
    one = experts(1, 14, 12)
    assert not merge("iso_c", torch.cat((one, -one))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iso_c_gives_directions_that_nobody_has_no_weight(dtype: torch.dtype) -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    u, s, vh = np.linalg.svd(task_vectors.sum(0).numpy(), full_matrices=False)
    merged = run("iso_c", task_vectors.to(dtype))
    assert error(merged.delta, s.mean() * u[:, :6] @ vh[:6]) <= TOLERANCE[dtype]
    assert merged.facts["rank"] == 6
    assert "rank 6 of 24" in merged.warnings[0]


# Iso-CTS


@pytest.mark.parametrize("common", [0.5, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 3])
@every_shape
def test_iso_cts_agrees(shape: tuple[int, int], tasks: int, common: float) -> None:
    check("iso_cts", experts(tasks, *shape), reference_iso_cts, common=common)


def test_iso_cts_agrees_at_a_larger_size_with_its_defaults() -> None:
    check("iso_cts", experts(5, 64, 80, decay=1.0), reference_iso_cts)


@every_shape
def test_iso_cts_has_one_singular_value(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(merge("iso_cts", experts(3, *shape), common=0.6))
    torch.testing.assert_close(values, values.mean().expand_as(values))


@every_shape
def test_iso_cts_of_one_expert_or_with_all_in_common_is_iso_c(shape: tuple[int, int]) -> None:
    one, several = experts(1, *shape), experts(3, *shape)
    assert error(merge("iso_cts", one), merge("iso_c", one)) <= 1e-9
    assert error(merge("iso_cts", several, common=1.0), merge("iso_c", several)) <= 1e-9


def test_iso_cts_with_no_direction_left_for_a_task_is_iso_c() -> None:
    task_vectors = experts(4, 10, 10)  # 2 directions for 4 tasks: round(0.5) = 0
    assert error(merge("iso_cts", task_vectors), merge("iso_c", task_vectors)) <= 1e-9


@given(rows=st.integers(1, 12), cols=st.integers(1, 12), tasks=st.integers(1, 14), common=st.floats(0.5, 1))
def test_iso_cts_always_finds_directions_to_share(rows: int, cols: int, tasks: int, common: float) -> None:
    assert torch.isfinite(merge("iso_cts", experts(tasks, rows, cols), common=common)).all()


def test_iso_cts_refuses_a_common_share_that_could_leave_less_than_nothing() -> None:
    with pytest.raises(InputError, match=r"common=0.4 is not allowed: it must be a number >= 0.5 and <= 1"):
        merge("iso_cts", experts(3, 8, 8), common=0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iso_cts_takes_no_directions_from_rounding(dtype: torch.dtype) -> None:
    """All experts lie in the common subspace: nothing is left for any of them but rounding."""
    task_vectors = low_rank(3, 30, 24, rank=2)
    u, s, vh = np.linalg.svd(task_vectors.sum(0).numpy(), full_matrices=False)
    merged = run("iso_cts", task_vectors.to(dtype))
    assert error(merged.delta, s.mean() * u[:, :6] @ vh[:6]) <= TOLERANCE[dtype]
    assert "only 6 of the 24 directions" in merged.warnings[0]


def test_iso_cts_of_copies_is_reproducible_and_warns() -> None:
    task_vectors = experts(1, 14, 12).repeat(3, 1, 1)
    first, second = (run("iso_cts", task_vectors, common=0.5) for _ in range(2))
    assert first.delta.equal(second.delta)
    assert any("share leading directions" in warning for warning in first.warnings)


# ACTMat and WUDI


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("tasks", [1, 3, 6])
@every_shape
def test_closed_forms_agree(shape: tuple[int, int], tasks: int, decay: float) -> None:
    task_vectors = experts(tasks, *shape, decay=decay)
    check("actmat", task_vectors, reference_actmat)
    check("wudi", task_vectors, reference_wudi_closed, mode="closed_form")


@pytest.mark.parametrize("rtol", [1e-9, 1e-4, 0.05])
@every_shape
def test_closed_forms_agree_for_each_cut(shape: tuple[int, int], rtol: float) -> None:
    task_vectors = experts(3, *shape, decay=1.0)
    check("actmat", task_vectors, reference_actmat, rtol=rtol)
    check("wudi", task_vectors, reference_wudi_closed, mode="closed_form", rtol=rtol)


@every_shape
def test_the_default_cut_is_that_of_a_float32_pseudo_inverse(shape: tuple[int, int]) -> None:
    task_vectors = experts(2, *shape, decay=3.0)
    explicit = merge("actmat", task_vectors, rtol=shape[1] * 2.0**-23)
    assert merge("actmat", task_vectors).equal(explicit)
    steep = experts(6, 20, 16, decay=3.0)
    eigenvalues = torch.linalg.svdvals(torch.cat(tuple(steep))) ** 2
    for rtol in (None, 1e-13):
        expected = int((eigenvalues > (rtol or 16 * 2.0**-23) * eigenvalues[0]).sum())
        assert run("actmat", steep, **({"rtol": rtol} if rtol else {})).facts["kept_directions"] == expected


@pytest.mark.parametrize("options", [{"rtol": 0.0}, {"rtol": 1.0}, {"rtol": "double"}])
def test_a_cut_has_to_be_a_share(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"a number > 0 and < 1 or 'float32'"):
        merge("actmat", experts(2, 4, 4), **options)


@pytest.mark.parametrize(("name", "options"), [("actmat", {}), ("wudi", {"mode": "closed_form"})])
@pytest.mark.parametrize("copies", [1, 3])
@every_shape
def test_closed_form_of_one_expert_or_its_copies_is_that_expert(
    shape: tuple[int, int], copies: int, name: str, options: dict[str, str]
) -> None:
    task_vectors = experts(1, *shape).repeat(copies, 1, 1)
    assert error(merge(name, task_vectors, **options), task_vectors[0]) <= 1e-9


@pytest.mark.parametrize(("name", "options"), [("actmat", {}), ("wudi", {"mode": "closed_form"})])
def test_experts_that_read_different_inputs_are_summed(name: str, options: dict[str, str]) -> None:
    task_vectors = orthogonal_row_spaces(3, 10, 30, rank=6)
    assert error(merge(name, task_vectors, **options), task_vectors.sum(0)) <= 1e-9


@pytest.mark.parametrize(("name", "options"), [("actmat", {}), ("wudi", {"mode": "closed_form"})])
def test_every_expert_is_reproduced_on_its_own_inputs_if_these_are_independent(name: str, options: dict[str, str]) -> None:
    task_vectors = experts(3, 6, 30, decay=0.0)
    merged = merge(name, task_vectors, **options)
    for delta in task_vectors:
        assert error(merged @ delta.T, delta @ delta.T) <= 1e-9


@pytest.mark.parametrize("shape", [(12, 12), (8, 18), (20, 9)], ids=["square", "wide", "tall"])
def test_actmat_solves_the_normal_equation(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    merged = merge("actmat", task_vectors)
    terms = torch.stack([(merged - delta) @ delta.T @ delta for delta in task_vectors])
    assert terms.sum(0).norm() <= 1e-10 * terms.norm()


def test_actmat_stays_in_the_joint_row_space() -> None:
    task_vectors = low_rank(3, 10, 40, rank=2)
    rows = torch.linalg.svd(torch.cat(tuple(task_vectors)), full_matrices=False).Vh[:6]
    merged = merge("actmat", task_vectors)
    assert error(merged @ rows.T @ rows, merged) <= 1e-9


def test_actmat_follows_the_longest_expert_and_wudi_does_not() -> None:
    task_vectors = experts(3, 14, 12)
    distances = []
    for factor in (1e2, 1e3, 1e4):
        scaled = task_vectors * torch.tensor([factor, 1.0, 1.0], dtype=torch.float64)[:, None, None]
        distances.append(error(merge("actmat", scaled), scaled[0]))
    assert distances[0] > 50 * distances[1] > 2500 * distances[2]  # with the square of the length
    assert error(merge("wudi", scaled, mode="closed_form"), scaled[0]) > 0.1


def test_actmat_and_wudi_agree_on_experts_of_one_length() -> None:
    task_vectors = experts(3, 14, 12)
    task_vectors = task_vectors / task_vectors.square().sum((1, 2), keepdim=True).sqrt()
    assert error(merge("wudi", task_vectors, mode="closed_form"), merge("actmat", task_vectors)) <= 1e-9


@every_shape
def test_actmat_is_the_core_of_ace(shape: tuple[int, int]) -> None:
    """Without column means, prior, normalisation, refinement and (nearly) without a ridge, ACE is the same closed form."""
    task_vectors = experts(2, *shape, decay=0.0)
    task_vectors = task_vectors - task_vectors.mean(1, keepdim=True)
    core = merge("ace", task_vectors, epsilon=1e-12, normalise=False, prior=False, refine=False)
    assert error(core, merge("actmat", task_vectors)) <= 1e-5


@pytest.mark.parametrize("tasks", [2, 4])
@every_shape
def test_wudi_agrees_with_automatic_differentiation_and_adam(shape: tuple[int, int], tasks: int) -> None:
    check("wudi", experts(tasks, *shape), reference_wudi, steps=40, lr=2e-5)


def test_wudi_agrees_with_its_published_defaults() -> None:
    check("wudi", experts(3, 10, 8), reference_wudi)
    assert error(merge("wudi", experts(3, 10, 8)), reference_wudi(experts(3, 10, 8).numpy(), steps=300, lr=1e-5)) <= 1e-9


def test_wudi_without_steps_is_the_sum() -> None:
    task_vectors = experts(3, 10, 8)
    assert error(merge("wudi", task_vectors, steps=0), task_vectors.sum(0)) <= 1e-15


@every_shape
def test_wudi_of_one_expert_is_that_expert(shape: tuple[int, int]) -> None:
    task_vectors = experts(1, *shape)
    assert error(merge("wudi", task_vectors, steps=20), task_vectors[0]) <= 1e-12


@every_shape
def test_wudi_closed_form_minimises_its_loss(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape, decay=0.0)
    best = merge("wudi", task_vectors, mode="closed_form")
    loss = float(wudi_loss(best, task_vectors))
    M = best.clone().requires_grad_(True)
    wudi_loss(M, task_vectors).backward()
    at_zero = torch.zeros_like(best).requires_grad_(True)
    wudi_loss(at_zero, task_vectors).backward()
    assert M.grad is not None
    assert at_zero.grad is not None
    assert M.grad.norm() <= 1e-10 * at_zero.grad.norm()
    others = [task_vectors.sum(0), task_vectors.mean(0), *(best + 1e-4 * gaussian(*shape, seed=s) for s in range(5))]
    assert all(loss <= float(wudi_loss(other, task_vectors)) + 1e-15 for other in others)


def test_wudi_descends_towards_the_closed_form() -> None:
    task_vectors = experts(3, 12, 8, decay=0.0)
    least = float(wudi_loss(merge("wudi", task_vectors, mode="closed_form"), task_vectors))
    start, published = (float(wudi_loss(merge("wudi", task_vectors, steps=s), task_vectors)) for s in (0, 300))
    converged = merge("wudi", task_vectors, steps=3000, lr=1e-4)
    assert start > published > least
    assert float(wudi_loss(converged, task_vectors)) == pytest.approx(least, rel=1e-3)


def test_wudi_leaves_other_tensors_at_the_base_and_actmat_averages_them() -> None:
    base = {"a.weight": gaussian(6, 8), "a.bias": gaussian(6, seed=1)}
    tuned = [{name: w + 0.01 * gaussian(*w.shape, seed=10 + i) for name, w in base.items()} for i in range(3)]
    assert merge_state_dicts(base, tuned, method="wudi")["a.bias"].equal(base["a.bias"])
    average = sum(expert["a.bias"] for expert in tuned) / 3
    torch.testing.assert_close(merge_state_dicts(base, tuned, method="actmat")["a.bias"], average)


@pytest.mark.parametrize("route", ["lapack", "torch"])
@pytest.mark.parametrize("blocks", [2**20, 15])
@every_shape
def test_covariances_of_experts_as_they_are(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], route: str, blocks: int
) -> None:
    monkeypatch.setattr(linalg, "uses_lapack", lambda tensor: route == "lapack")
    monkeypatch.setattr(linalg, "_BLOCK_ELEMENTS", blocks)
    task_vectors, weights = experts(3, *shape), [0.5, 2.0]
    chosen = task_vectors[[0, 2]]
    S, CS = Experts(task_vectors, [0, 2], standard_frame(task_vectors), centre=False).weighted_covariance(weights)
    G = [w * delta.T @ delta for w, delta in zip(weights, chosen, strict=True)]
    identity = torch.eye(shape[1], dtype=torch.float64)
    torch.testing.assert_close(S.times(identity), G[0] + G[1])
    torch.testing.assert_close(CS, chosen[0] @ G[0] + chosen[1] @ G[1])
    merged, rank = Experts(task_vectors, [0, 2], standard_frame(task_vectors), centre=False).least_squares(weights, 1e-9)
    torch.testing.assert_close(merged, torch.from_numpy(closed_form(chosen.numpy(), weights, 1e-9)))
    assert rank == min(shape[1], 2 * shape[0])


# KnOTS-TIES


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("keep", [0.2, 0.6, 1.0])
@every_shape
def test_knots_ties_agrees(shape: tuple[int, int], keep: float, how: str) -> None:
    for tasks in (1, 3):
        task_vectors = experts(tasks, *shape)
        for dtype, tolerance in TOLERANCE.items():
            given_vectors = task_vectors.to(dtype)
            [expected] = reference_knots([given_vectors.double().numpy()], keep=keep, merge=how)
            assert error(merge("knots_ties", given_vectors, keep=keep, merge=how), expected) <= tolerance


@pytest.mark.parametrize("shared", ["output", "input"])
@pytest.mark.parametrize("spectrum", ["before", "after"])
def test_knots_ties_agrees_for_its_variants(shared: str, spectrum: str) -> None:
    for shape in SHAPES.values():
        task_vectors = experts(3, *shape)
        [expected] = reference_knots([task_vectors.numpy()], keep=0.3, shared=shared, spectrum=spectrum)
        assert error(merge("knots_ties", task_vectors, keep=0.3, shared=shared, spectrum=spectrum), expected) <= 1e-9


def test_knots_ties_variants_differ() -> None:
    task_vectors = experts(3, 12, 12)
    default = merge("knots_ties", task_vectors)
    for options in ({"shared": "input"}, {"spectrum": "after"}, {"merge": "sum"}, {"keep": 0.5}, {"drop": 0.5}):
        assert error(merge("knots_ties", task_vectors, **options), default) > 1e-3


def test_knots_ties_sharing_inputs_is_the_transpose_of_sharing_outputs() -> None:
    task_vectors = experts(3, 12, 17)
    assert error(merge("knots_ties", task_vectors.mT.contiguous(), shared="input").T, merge("knots_ties", task_vectors)) <= 1e-9


def small_model(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Matrices of several shapes, one that nobody changed, and a vector."""
    shapes: dict[str, tuple[int, ...]] = {"a.weight": (9, 12), "b.weight": (14, 6), "c.weight": (5, 5), "d.bias": (7,)}
    base = {name: gaussian(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}
    scales = {"a.weight": 0.02, "b.weight": 0.05, "c.weight": 0.0, "d.bias": 0.1}
    tuned = {
        expert: {
            name: (w.double() + scales[name] * gaussian(*w.shape, seed=100 * i + j)).to(dtype)
            for j, (name, w) in enumerate(base.items())
        }
        for i, expert in enumerate("xyz", 1)
    }
    return base, tuned


def deltas(base: dict[str, Tensor], tuned: dict[str, dict[str, Tensor]], name: str) -> Tensor:
    """As the engine subtracts: in the dtype of the weights."""
    return torch.stack([expert[name] - base[name] for expert in tuned.values()])


@pytest.mark.parametrize("options", [{}, {"keep": 0.5, "merge": "sum"}, {"shared": "input"}, {"keep": 1.0}, {"scope": "tensor"}])
def test_knots_ties_takes_one_threshold_over_the_whole_model(options: dict[str, Any]) -> None:
    for dtype, tolerance in TOLERANCE.items():
        base, tuned = small_model(dtype)
        merged = merge_state_dicts(base, tuned, method="knots_ties", alpha=1.0, **options)
        names = ["a.weight", "b.weight"]
        vectors = [deltas(base, tuned, name).double().numpy() for name in names]
        if options == {"scope": "tensor"}:
            expected = [reference_knots([v])[0] for v in vectors]
        else:
            expected = reference_knots(vectors, **options)
        for name, delta in zip(names, expected, strict=True):
            assert error(merged[name].double() - base[name].double(), delta) <= max(tolerance, 1e-4)
            assert error(merged[name], base[name].double() + torch.from_numpy(delta)) <= tolerance / 100
        assert merged["c.weight"].equal(base["c.weight"])
        assert merged["d.bias"].equal(base["d.bias"])


@pytest.mark.parametrize("drop", [0.1, 0.7])
def test_knots_ties_after_dare_agrees(drop: float) -> None:
    base, tuned = small_model(torch.float64)
    names, seed = ["a.weight", "b.weight"], 421
    vectors = [deltas(base, tuned, name) for name in names]
    # Signs and order of the basis decide which coordinate a random number meets: take the coordinates from the method.
    options = KnotsTiesOptions()
    aligned = [align(v, options, Context()) for v in vectors]

    def dropped(index: int, t: int) -> Array:
        context = Context(names[index], tuple(tuned))
        Z = aligned[index].coordinates[t]
        draws = torch.rand(Z.shape, generator=context.generator(seed, t), dtype=torch.float32)
        return np.asarray(torch.where(draws < 1 - drop, Z / (1 - drop), torch.zeros_like(Z)).numpy())

    coordinates = [np.stack([dropped(index, t) for t in range(3)]) for index in range(2)]
    expected = [a.basis.numpy() @ z for a, z in zip(aligned, reference_ties(coordinates, 1.0, "mean"), strict=True)]
    merged = merge_state_dicts(base, tuned, method="knots_ties", alpha=1.0, keep=1.0, drop=drop, seed=seed)
    for name, delta in zip(names, expected, strict=True):
        assert error(merged[name] - base[name], delta) <= 1e-9


@every_shape
def test_knots_ties_of_one_untrimmed_expert_is_that_expert(shape: tuple[int, int]) -> None:
    task_vectors = experts(1, *shape)
    assert error(merge("knots_ties", task_vectors, keep=1.0), task_vectors[0]) <= 1e-9


@pytest.mark.parametrize("copies", [2, 3])
def test_knots_ties_of_untrimmed_copies_is_that_expert(copies: int) -> None:
    task_vectors = experts(1, 9, 12).repeat(copies, 1, 1)
    assert error(merge("knots_ties", task_vectors, keep=1.0), task_vectors[0]) <= 1e-9


@pytest.mark.parametrize("spectrum", ["before", "after"])
@every_shape
def test_knots_coordinates_reproduce_the_experts(shape: tuple[int, int], spectrum: str) -> None:
    task_vectors = experts(3, *shape)
    aligned = align(task_vectors, KnotsTiesOptions(spectrum=spectrum), Context())  # type: ignore[arg-type]
    assert error(aligned.basis @ aligned.coordinates, task_vectors) <= 1e-9
    assert aligned.unique
    if spectrum == "before":
        identity = torch.eye(aligned.basis.shape[1], dtype=torch.float64)
        assert torch.dist(aligned.basis.T @ aligned.basis, identity) <= 1e-9


def test_knots_ties_of_low_rank_experts_stays_in_their_column_space() -> None:
    task_vectors = low_rank(3, 40, 20, rank=2)
    columns = torch.linalg.svd(torch.cat(tuple(task_vectors), 1), full_matrices=False).U[:, :6]
    merged = run("knots_ties", task_vectors)
    assert merged.facts["directions"] == 6
    assert error(columns @ columns.T @ merged.delta, merged.delta) <= 1e-9


def test_knots_ties_cuts_weak_directions_but_not_the_last_one() -> None:
    task_vectors = experts(2, 9, 12, decay=2.0)
    values = torch.linalg.svdvals(torch.cat(tuple(task_vectors), 1))
    for cut in (float(values[3]) * 1.001, 1e9):
        [expected] = reference_knots([task_vectors.numpy()], keep=1.0, cut=cut)
        merged = run("knots_ties", task_vectors, keep=1.0, cut=cut)
        assert error(merged.delta, expected) <= 1e-9
        assert merged.facts["directions"] == (1 if cut > 1 else 3)


def test_knots_ties_says_when_its_basis_is_not_unique() -> None:
    one = torch.zeros(1, 6, 8)
    one[0, 0, 0] = one[0, 1, 1] = 0.5
    assert "not unique" in run("knots_ties", one).warnings[0]
    assert run("knots_ties", experts(3, 6, 8)).warnings == ()


def test_knots_ties_does_not_depend_on_the_order_of_experts() -> None:
    task_vectors = experts(3, 9, 12)
    assert error(merge("knots_ties", task_vectors[[2, 0, 1]]), merge("knots_ties", task_vectors)) <= 1e-9


def test_knots_ties_default_scale_is_the_authors() -> None:
    task_vectors = experts(3, 9, 12)
    assert error(merge_task_vectors(task_vectors, method="knots_ties"), 0.6 * merge("knots_ties", task_vectors)) <= 1e-12


# Core Space


@pytest.mark.parametrize("rank", [1, 2, 5])
@every_shape
def test_cores_hold_the_experts_without_loss(shape: tuple[int, int], rank: int) -> None:
    task_vectors = low_rank(3, *shape, min(rank, *shape))
    core = core_of(task_vectors, standard_frame(task_vectors))
    assert error(core.left @ core.cores @ core.right.T, task_vectors) <= 1e-9
    for basis in (core.left, core.right):
        assert torch.dist(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64)) <= 1e-9
        assert basis.shape[1] <= 3 * rank


def test_cores_of_experts_with_different_ranks_copies_and_zeros() -> None:
    task_vectors = torch.cat(
        (low_rank(1, 30, 24, 2), low_rank(1, 30, 24, 3, seed=7), torch.zeros(1, 30, 24, dtype=torch.float64))
    )
    task_vectors = torch.cat((task_vectors, task_vectors[:1]))
    core = core_of(task_vectors, standard_frame(task_vectors))
    assert core.cores.shape == (4, 5, 5)
    assert error(core.left @ core.cores @ core.right.T, task_vectors) <= 1e-9


INNER = {"tsv_m": reference_tsv_m, "iso_c": reference_iso_c, "cart": reference_cart, "actmat": reference_actmat}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("shape", [(40, 30), (30, 64)])
def test_core_space_agrees(shape: tuple[int, int], inner: str) -> None:
    task_vectors = low_rank(3, *shape, rank=4)

    def reference(tau: Array, inner: str) -> Array:
        U, V, cores = reference_core(tau)
        return np.asarray(U @ INNER[inner](cores) @ V.T)

    check("core_space", task_vectors, reference, inner=inner)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_core_space_takes_whole_model_statistics_of_the_cores(dtype: torch.dtype) -> None:
    base, tuned = small_model(dtype)
    names = ["a.weight", "b.weight"]
    for i, expert in enumerate(tuned.values()):
        for name in names:
            rows, cols = base[name].shape
            expert[name] = base[name] + (low_rank(1, rows, cols, 1, seed=10 * i)[0] / 8).to(dtype)
    parts = [reference_core(deltas(base, tuned, name).double().numpy()) for name in names]
    merged_cores = reference_ties([cores for _, _, cores in parts], 0.2, "mean")
    merged = merge_state_dicts(base, tuned, method="core_space", inner="ties", alpha=1.0)
    for name, (U, V, _), core in zip(names, parts, merged_cores, strict=True):
        assert error(merged[name].double() - base[name].double(), U @ core @ V.T) <= max(TOLERANCE[dtype], 1e-4)
    assert merged["c.weight"].equal(base["c.weight"])
    assert merged["d.bias"].equal(base["d.bias"])


@every_shape
def test_core_space_task_arithmetic_is_task_arithmetic(shape: tuple[int, int]) -> None:
    for task_vectors in (experts(3, *shape), low_rank(3, *shape, rank=2)):
        expected = merge("task_arithmetic", task_vectors)
        assert error(merge("core_space", task_vectors, inner="task_arithmetic"), expected) <= 1e-9


@pytest.mark.parametrize("inner", ["tsv_m", "iso_c", "cart"])
@every_shape
def test_core_space_of_full_rank_experts_is_the_full_space(shape: tuple[int, int], inner: str) -> None:
    task_vectors = experts(3, *shape)
    assert error(merge("core_space", task_vectors, inner=inner), merge(inner, task_vectors)) <= 1e-8


def test_core_space_of_one_expert_is_that_expert() -> None:
    for task_vectors in (experts(1, 9, 12), low_rank(1, 20, 24, rank=3)):
        assert error(merge("core_space", task_vectors), task_vectors[0]) <= 1e-9


def test_core_space_iso_c_flattens_only_what_the_experts_have() -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    merged = run("core_space", task_vectors, inner="iso_c")
    before = torch.linalg.svdvals(task_vectors.sum(0))[:6]
    after = torch.linalg.svdvals(merged.delta)
    torch.testing.assert_close(after[:6], before.mean().expand(6))
    assert after[6] <= 1e-10
    assert (merged.facts["core_rows"], merged.facts["core_columns"], merged.warnings) == (6, 6, ())


def test_core_space_tsv_m_has_the_kept_singular_values() -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    kept = torch.linalg.svdvals(task_vectors)[:, :2].flatten().sort(descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(merge("core_space", task_vectors))[:6], kept)


def test_core_space_has_one_scale_its_own() -> None:
    task_vectors = low_rank(3, 30, 24, rank=2)
    assert error(merge_task_vectors(task_vectors, method="core_space"), 0.2 * merge("core_space", task_vectors)) <= 1e-12
    expected = 0.5 * task_vectors.sum(0)  # not times task arithmetic's own 0.3
    assert error(merge("core_space", task_vectors, inner="task_arithmetic", alpha=0.5), expected) <= 1e-9


def test_core_space_hands_on_what_the_inner_method_says() -> None:
    merged = run("core_space", low_rank(3, 30, 24, rank=2)[[0, 0, 1]], inner="tsv_m")
    assert any("share leading directions" in warning for warning in merged.warnings)
    assert merged.facts["active_experts"] == 3


@pytest.mark.parametrize("inner", ["core_space", "emr", "slerp", "regmean"])
def test_core_space_refuses_methods_that_cannot_merge_cores(inner: str) -> None:
    with pytest.raises(InputError, match=f"inner='{inner}' is not allowed"):
        merge("core_space", experts(2, 8, 8), inner=inner)


def test_core_space_suggests_a_method_that_exists() -> None:
    with pytest.raises(InputError, match="did you mean 'tsv_m'"):
        merge("core_space", experts(2, 8, 8), inner="tsvm")


# What linalg has for these methods


@pytest.fixture(params=["lapack", "torch"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "uses_lapack", lambda tensor: request.param == "lapack")


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("rtol", [1e-12, 1e-2, 0.5])
def test_pseudo_inverse_leaves_out_small_eigenvalues(rtol: float) -> None:
    x, a = gaussian(6, 9), gaussian(4, 9, seed=1)
    gram = x.T @ x
    expected = a.numpy() @ np.linalg.pinv(gram.numpy(), rcond=rtol, hermitian=True)
    divide, kept = linalg.pseudo_inverse(gram, rtol)
    assert error(divide(a), expected) <= 1e-9
    assert kept == int((torch.linalg.svdvals(x) ** 2 > rtol * torch.linalg.svdvals(x)[0] ** 2).sum())


def test_pseudo_inverse_of_zero_is_zero() -> None:
    divide, kept = linalg.pseudo_inverse(torch.zeros(3, 3, dtype=torch.float64), 1e-6)
    assert kept == 0
    assert not divide(gaussian(2, 3)).any()


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_polar_counts_directions_below_the_cut_as_missing(shape: tuple[int, int]) -> None:
    r = min(shape)
    u, v = torch.linalg.qr(gaussian(shape[0], r)).Q, torch.linalg.qr(gaussian(shape[1], r, seed=1)).Q
    values = torch.ones(r, dtype=torch.float64)
    values[-1] = 1e-6
    matrix = (u * values) @ v.T
    exact, cut = linalg.polar(matrix), linalg.polar(matrix, 1e-5)
    assert (exact.deficient, cut.deficient) == (False, True)
    torch.testing.assert_close(exact.factor, u @ v.T)
    torch.testing.assert_close(cut.factor, u[:, :-1] @ v[:, :-1].T)


def test_fixed_signs_do_not_depend_on_those_of_the_factorisation() -> None:
    vectors = gaussian(7, 5)
    fixed = vectors * linalg.fixed_signs(vectors)
    assert all(column[column.abs().argmax()] > 0 for column in fixed.T)
    flipped = vectors * torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    assert fixed.equal(flipped * linalg.fixed_signs(flipped))
    assert linalg.fixed_signs(vectors[:, :0]).shape == (0,)


def test_changed_tasks() -> None:
    task_vectors = torch.zeros(3, 2, 2)
    task_vectors[1, 0, 0] = 1e-30
    assert linalg.changed_tasks(task_vectors) == [1]
