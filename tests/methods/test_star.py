"""STAR against its transcription, and what truncation and rescaling leave."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_references import reference_star
from spectral_cases import SHAPES, check, error, every_shape, experts, low_rank, merge, rotation, run


@pytest.mark.parametrize("keep", [0.05, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("tasks", [1, 3])
@every_shape
def test_star_agrees(shape: tuple[int, int], tasks: int, keep: float) -> None:
    check("star", experts(tasks, *shape), reference_star, keep=keep)


@given(keep=st.floats(0.01, 1), seed=st.integers(0, 1000), shape=st.sampled_from(sorted(SHAPES)))
def test_an_expert_keeps_its_nuclear_norm_in_as_few_directions_as_have_the_share(keep: float, seed: int, shape: str) -> None:
    tau = experts(1, *SHAPES[shape], seed=seed)
    merged = run("star", tau, keep=keep)
    before, after = torch.linalg.svdvals(tau[0]), torch.linalg.svdvals(merged.delta)
    k = int(merged.facts["most_directions"])
    assert float(after.sum() / before.sum()) == pytest.approx(1)
    torch.testing.assert_close(after[:k] / after[0], before[:k] / before[0])
    assert float(after[k:].sum()) <= 1e-9 * float(after.sum())
    assert float(before[:k].sum()) >= keep * float(before.sum()) * (1 - 1e-9)
    assert float(before[: k - 1].sum()) < keep * float(before.sum()) * (1 + 1e-9)


@every_shape
def test_star_of_everything_is_the_average(shape: tuple[int, int]) -> None:
    for task_vectors in (experts(3, *shape), low_rank(3, *shape, rank=2)):
        assert error(merge("star", task_vectors, keep=1.0), task_vectors.mean(0)) <= 1e-9


def test_experts_of_different_spectra_keep_different_numbers() -> None:
    task_vectors = torch.cat((experts(1, 12, 12, decay=2.0), rotation(12, 0)[None]))
    facts = run("star", task_vectors).facts
    assert facts["most_directions"] == 5  # 40% of 12 equal ones
    assert int(facts["fewest_directions"]) < 5


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), shape=st.sampled_from(sorted(SHAPES)))
def test_rotations_scales_and_transposes_go_through(seed: int, scale: float, shape: str) -> None:
    rows, cols = SHAPES[shape]
    Q, R, task_vectors = rotation(rows, seed), rotation(cols, seed + 1), experts(3, rows, cols)
    expected = merge("star", task_vectors)
    assert error(merge("star", scale * Q @ task_vectors @ R), scale * Q @ expected @ R) <= 1e-8
    assert error(merge("star", task_vectors.mT.contiguous()).T, expected) <= 1e-8
