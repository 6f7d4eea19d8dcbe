"""Core Space: cores lose nothing, and inner methods on them are what their transcriptions give."""

import numpy as np
import pytest
import torch

from acemerge import merge_state_dicts, merge_task_vectors
from acemerge.errors import InputError
from acemerge.methods.core_space import core_of
from acemerge.numerics.frame import standard_frame
from spectral_cases import TOLERANCE, Array, check, deltas, error, every_shape, experts, low_rank, merge, run, small_model
from spectral_references import reference_actmat, reference_cart, reference_core, reference_iso_c, reference_ties, reference_tsv_m


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
