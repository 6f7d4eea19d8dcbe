"""ACE without tuning: against a plain transcription, and what follows from the formula."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from acemerge import merge_task_vectors
from acemerge.errors import InputError
from acemerge.methods import Context, get_method
from acemerge.methods.shared_routes import find_route, merge_at_points
from acemerge.numerics.frame import Factors, to_cores
from spectral_cases import TOLERANCE, error, every_shape, experts, gaussian, low_rank, rotation

Array = NDArray[np.float64]
METHOD = get_method("ace_auto")


def reference(
    D: Array, W0: Array | None, power: float = 0.25, reach: float = 0.08, ridge: float = 0.01, alpha: float = 1.0
) -> Array:
    """The page's formula, step by step, with an explicit inverse and a full SVD."""
    D = D[[bool(own.any()) for own in D]]
    n = D.shape[2]
    mean = D.mean(0)
    # 1. Every covariance has the mean eigenvalue 1/n, and a ridge of a share r of it.
    S = [own.T @ own / np.sum(own**2) + ridge / n * np.eye(n) for own in D]
    P = sum(own @ S_t for own, S_t in zip(D, S, strict=True)) @ np.linalg.inv(sum(S))
    # 2.
    U, s, Vt = np.linalg.svd(P - mean, full_matrices=False)
    keep = s > 1e-5 * s[0]
    # 3.
    base = 0.0 if W0 is None else np.linalg.norm(W0, 2)
    top = min(s[0], reach * base * keep.mean())
    # 4.
    strengths = np.where(keep, top * (s / max(s[0], 1e-300)) ** power, 0.0)
    return np.asarray(alpha * (mean + (U * strengths) @ Vt))


def merge(task_vectors: Tensor, base: Tensor | None, **options: Any) -> Tensor:
    return merge_task_vectors(task_vectors, method="ace_auto", base=base, **options)


def check(task_vectors: Tensor, base: Tensor | None, **options: Any) -> None:
    for dtype, tolerance in TOLERANCE.items():
        D, W0 = task_vectors.to(dtype), None if base is None else base.to(dtype)
        expected = reference(D.double().numpy(), None if W0 is None else W0.double().numpy(), **options)
        actual = merge(D, W0, **options)
        assert actual.dtype == dtype
        assert error(actual, expected) <= tolerance


def base_of(shape: tuple[int, ...], length: float = 3.0) -> Tensor:
    W0 = gaussian(*shape, seed=77)
    return W0 * (length / float(W0.norm()))


@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("tasks", [1, 2, 5])
@every_shape
def test_agrees(shape: tuple[int, int], tasks: int, decay: float) -> None:
    check(experts(tasks, *shape, decay=decay), base_of(shape))


@pytest.mark.parametrize(
    "options", [{"power": 0.0}, {"power": 1.0}, {"reach": 0.0}, {"reach": 50.0}, {"ridge": 1e-4}, {"ridge": 10.0}]
)
@every_shape
def test_agrees_for_each_option(shape: tuple[int, int], options: dict[str, float]) -> None:
    check(experts(3, *shape), base_of(shape), alpha=0.7, **options)


@pytest.mark.parametrize("length", [0.0, 1e-3, 0.1, 1.0, 100.0])
def test_agrees_for_bases_of_every_length(length: float) -> None:
    check(experts(4, 14, 12), base_of((14, 12), length))


def test_agrees_on_low_rank_experts() -> None:
    check(low_rank(3, 30, 24, rank=2), base_of((30, 24)))


def test_without_a_base_or_without_reach_it_is_the_average() -> None:
    task_vectors, W0 = experts(3, 14, 12), base_of((14, 12))
    assert error(merge(task_vectors, None), task_vectors.mean(0)) <= 1e-12
    assert error(merge(task_vectors, W0, reach=0.0), task_vectors.mean(0)) <= 1e-12


def test_all_of_the_reach_and_the_power_are_the_closed_form() -> None:
    """P itself: the best merge under the covariances, ACE without its normalisation, prior and refinement."""
    task_vectors = experts(3, 14, 12)
    D = task_vectors.numpy()
    S = [own.T @ own / np.sum(own**2) + 0.01 / 12 * np.eye(12) for own in D]
    P = sum(own @ S_t for own, S_t in zip(D, S, strict=True)) @ np.linalg.inv(sum(S))
    assert error(merge(task_vectors, base_of((14, 12)), power=1.0, reach=1e6), P) <= 1e-9


# One expert, copies, experts with nothing in common


@pytest.mark.parametrize("copies", [1, 2, 5])
@pytest.mark.parametrize("length", [0.0, 0.1, 100.0])
def test_copies_of_an_expert_come_back_as_that_expert(copies: int, length: float) -> None:
    one = experts(1, 14, 12)
    assert error(merge(one.repeat(copies, 1, 1), base_of((14, 12), length)), one[0]) <= 1e-9


def test_an_expert_that_changed_nothing_has_no_opinion() -> None:
    task_vectors, W0 = experts(3, 14, 12), base_of((14, 12))
    idle = torch.cat((task_vectors, torch.zeros(2, 14, 12, dtype=torch.float64)))
    assert error(merge(idle, W0), merge(task_vectors, W0)) <= 1e-12


def test_experts_that_cancel_leave_the_base() -> None:
    one = experts(1, 14, 12)
    for task_vectors in (torch.cat((one, -one)), torch.zeros(2, 14, 12, dtype=torch.float64)):
        assert float(merge(task_vectors, base_of((14, 12))).norm()) <= 1e-12


@pytest.mark.parametrize(
    ("classes", "reach"),
    [
        ([], 0.08), (["BertForSequenceClassification"], 0.08), (["GPT2Model"], 0.08), (["LlamaForCausalLM"], 0.04),
        (["GPT2LMHeadModel"], 0.04), (["T5ForConditionalGeneration"], 0.04), (["ViTModel", "BertForMaskedLM"], 0.04),
    ],
)  # fmt: skip
def test_models_that_write_text_take_half(classes: list[str], reach: float) -> None:
    options = METHOD.options({}).resolve({"architectures": classes})
    assert options == METHOD.options({"reach": reach})
    assert METHOD.options({"reach": 0.3}).resolve({"architectures": classes}) == METHOD.options({"reach": 0.3})


def test_what_it_tells() -> None:
    task_vectors, W0 = experts(4, 14, 12), base_of((14, 12), 1.0)
    merged = METHOD(task_vectors, METHOD.options({}), Context(experts=tuple("abcd"), base=W0))
    rms = float(task_vectors.flatten(1).norm(dim=1).square().mean().sqrt())
    assert merged.facts["active_experts"] == 4
    assert merged.facts["length"] == pytest.approx(float(merged.delta.norm()) / rms)
    assert 0.25 <= float(merged.facts["overlap"]) < 0.5
    assert merged.facts["rank"] == 12
    assert merged.facts["strength"] == pytest.approx(0.08)


# Units and coordinates

scales = st.floats(1e-3, 1e3)


def beyond(task_vectors: Tensor, W0: Tensor, **options: Any) -> Tensor:
    """What is added to the average."""
    return merge(task_vectors, W0, **options) - task_vectors.mean(0)


@given(together=scales, alone=scales, tasks=st.integers(2, 5), seed=st.integers(0, 50))
def test_units_do_not_matter(together: float, alone: float, tasks: int, seed: int) -> None:
    """Base and experts times g: M times g. The experts alone times g: their average is, and the same directions are added."""
    task_vectors, W0 = experts(tasks, 10, 8, seed=seed), base_of((10, 8))
    assert error(merge(together * task_vectors, together * W0), together * merge(task_vectors, W0)) <= 1e-9
    plain, stronger = beyond(task_vectors, W0), beyond(alone * task_vectors, W0)
    assert error(stronger / stronger.norm(), plain / plain.norm()) <= 1e-8
    expected = reference((alone * task_vectors).numpy(), W0.numpy())
    assert error(merge(alone * task_vectors, W0), expected) <= 1e-9


@given(tasks=st.integers(2, 8), seed=st.integers(0, 50), reach=st.floats(1e-4, 10))
def test_what_is_added_is_no_stronger_than_the_base_takes_or_the_closed_form_says(tasks: int, seed: int, reach: float) -> None:
    task_vectors, W0 = experts(tasks, 10, 8, seed=seed), base_of((10, 8))
    found = float(torch.linalg.matrix_norm(beyond(task_vectors, W0, reach=reach), 2))
    closed_form = float(torch.linalg.matrix_norm(beyond(task_vectors, W0, reach=1e9, power=1.0), 2))
    assert found == pytest.approx(min(closed_form, reach * float(torch.linalg.matrix_norm(W0, 2))))


@given(seed=st.integers(0, 50), step=st.floats(1e-6, 1e-2))
def test_almost_copies_come_back_almost_unchanged(seed: int, step: float) -> None:
    """Small differences among the experts are not made large."""
    one = experts(1, 10, 8, seed=seed)
    near = one + step * experts(3, 10, 8, seed=seed + 1)
    assert float(beyond(near, base_of((10, 8), 100.0)).norm()) <= 100 * step


@given(seed=st.integers(0, 50), tasks=st.integers(1, 5))
def test_neither_order_nor_coordinates_matter(seed: int, tasks: int) -> None:
    task_vectors, W0 = experts(tasks, 10, 8, seed=seed), base_of((10, 8))
    plain = merge(task_vectors, W0)
    assert error(merge(task_vectors.flip(0), W0), plain) <= 1e-9
    left, right = rotation(10, seed), rotation(8, seed + 1)
    assert error(merge(left @ task_vectors @ right, left @ W0 @ right), left @ plain @ right) <= 1e-8


def test_the_core_of_adapters_gives_the_same_merge() -> None:
    factors: list[Factors | None] = [
        Factors(gaussian(30, rank, seed=rank), gaussian(rank, 22, seed=9 + rank)) for rank in (2, 3, 1)
    ]
    dense = torch.stack([own.left @ own.right for own in factors if own])
    frame, cores = to_cores(factors, (30, 22), "both")
    W0 = base_of((30, 22), 40.0)
    found = METHOD(cores, METHOD.options({}), Context(experts=tuple("abc"), base=W0, frame=frame)).delta
    assert found.shape == cores.shape[1:]
    assert error(frame.to_right(frame.to_left(found)), merge(dense, W0)) <= 1e-9


# Many settings


def test_a_sweep_shares_the_work_and_changes_nothing() -> None:
    task_vectors = experts(4, 14, 12)
    context = Context(experts=tuple("abcd"), base=base_of((14, 12)))
    grid = [
        METHOD.options({"power": p, "reach": k, "ridge": r, "alpha": alpha})
        for p in (0.25, 0.5) for k in (0.01, 0.06) for r in (0.01, 0.1) for alpha in (1.0, 0.5)
    ]  # fmt: skip
    found: dict[int, Tensor] = {}
    for points, merged in merge_at_points(METHOD, task_vectors, grid, [context] * len(grid)):
        found |= {point: merged.delta.clone() for point in points}
        merged.delta.fill_(torch.nan)
    assert find_route("ace_auto") is not None
    assert sorted(found) == list(range(len(grid)))
    for point, own in enumerate(grid):
        assert error(found[point], METHOD(task_vectors, own, context).delta) <= 1e-12


def test_a_base_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match=r"base has shape \[12, 14\], the task vectors \[14, 12\]"):
        merge(experts(2, 14, 12), base_of((12, 14)))
