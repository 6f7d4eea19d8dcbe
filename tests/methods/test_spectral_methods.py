"""What methods built on singular vectors and Gram matrices have in common. Singular vectors are never compared: products are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.methods import get_method
from spectral_cases import SHAPES, SPECTRAL, error, every_shape, experts, merge, rotation, run

ROTATING = ("cart", "tsv_m", "iso_c", "iso_cts", "actmat", "wudi", "core_space", "swudi", "swudi_a")
"""Methods that depend on no coordinates."""


@pytest.mark.parametrize("name", ROTATING)
@given(order=st.permutations(range(4)), shape=st.sampled_from(sorted(SHAPES)))
def test_order_of_experts_does_not_matter(name: str, order: list[int], shape: str) -> None:
    task_vectors = experts(4, *SHAPES[shape])
    options = {"steps": 5} if name == "wudi" else {}
    assert error(merge(name, task_vectors[order], **options), merge(name, task_vectors, **options)) <= 1e-9


@pytest.mark.parametrize("mode", ROTATING)
@given(scale=st.floats(1e-3, 1e3), shape=st.sampled_from(sorted(SHAPES)))
def test_longer_task_vectors_give_a_longer_merge(mode: str, scale: float, shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape])
    options = {"mode": "closed_form"} if mode == "wudi" else {}
    assert error(merge(mode, scale * task_vectors, **options), scale * merge(mode, task_vectors, **options)) <= 1e-9


@pytest.mark.parametrize("name", ROTATING)
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


@pytest.mark.parametrize("name", ["iso_cts", "actmat", "wudi", "knots_ties", "swudi", "swudi_a"])
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


@pytest.mark.parametrize("name", ["tsv_m", "iso_c", "iso_cts", "wudi", "actmat", "core_space", "swudi", "swudi_a"])
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
