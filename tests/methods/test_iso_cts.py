"""Iso-CTS against its transcription, and what follows from the formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.errors import InputError
from spectral_cases import TOLERANCE, check, error, every_shape, experts, low_rank, merge, run
from spectral_references import reference_iso_cts


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
