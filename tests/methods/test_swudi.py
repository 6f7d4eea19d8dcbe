"""SWUDI and SWUDI-A against their transcriptions, the flow that they are a closed form of, and what follows from both."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import expm

from frontier_references import reference_swudi, reference_swudi_a, wudi_system
from spectral_cases import SHAPES, check, error, every_shape, experts, low_rank, merge, orthogonal_row_spaces, rotation, run
from spectral_references import wudi_loss


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("tasks", [1, 3, 6])
@every_shape
def test_both_agree(shape: tuple[int, int], tasks: int, decay: float) -> None:
    task_vectors = experts(tasks, *shape, decay=decay)
    check("swudi", task_vectors, reference_swudi)
    check("swudi_a", task_vectors, reference_swudi_a)


@pytest.mark.parametrize("options", [{"steps": 5.0}, {"keep": 0.2}, {"keep": 1.0}, {"steps": 1e5, "keep": 0.5}], ids=str)
@every_shape
def test_swudi_agrees_for_each_option(shape: tuple[int, int], options: dict[str, float]) -> None:
    check("swudi", experts(3, *shape), reference_swudi, **options)


@pytest.mark.parametrize("steps", [0.5, 20.0])
@every_shape
def test_swudi_of_all_directions_is_the_flow_of_the_loss(shape: tuple[int, int], steps: float) -> None:
    """dM/ds = B - M C from the sum: with an extended matrix, one exponential."""
    task_vectors = experts(3, *shape)
    C, B = wudi_system(task_vectors.numpy())
    (m, n), theta0 = shape, task_vectors.sum(0).numpy()
    flow = expm(steps * np.block([[-C, np.zeros((n, m))], [B, np.zeros((m, m))]]))  # of rows (M, I)
    assert error(merge("swudi", task_vectors, steps=steps, keep=1.0), theta0 @ flow[:n, :n] + flow[n:, :n]) <= 1e-9


@every_shape
def test_swudi_without_steps_is_the_sum_and_with_many_the_minimum(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape, decay=0.0)
    assert error(merge("swudi", task_vectors, steps=0.0), task_vectors.sum(0)) <= 1e-12
    best = merge("wudi", task_vectors, mode="closed_form", rtol=1e-12)
    assert error(merge("swudi", task_vectors, steps=1e12, keep=1.0), best) <= 1e-7


@given(
    steps=st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)),
    keep=st.floats(0.05, 1),
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 1000),
)
def test_more_steps_never_raise_the_loss(steps: tuple[float, float], keep: float, shape: str, seed: int) -> None:
    task_vectors = experts(3, *SHAPES[shape], seed=seed)
    fewer, more = (float(wudi_loss(merge("swudi", task_vectors, steps=s, keep=keep), task_vectors)) for s in sorted(steps))
    assert more <= fewer * (1 + 1e-9)


@given(shape=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 1000), tasks=st.integers(1, 5))
def test_swudi_a_is_the_minimum_along_as_many_directions_as_it_says(shape: str, seed: int, tasks: int) -> None:
    task_vectors = experts(tasks, *SHAPES[shape], seed=seed)
    merged = run("swudi_a", task_vectors)
    C, B = wudi_system(task_vectors.numpy())
    K = int(merged.facts["filtered_directions"])
    V = np.linalg.eigh(C)[1]
    M = merged.delta.numpy()
    assert np.linalg.norm((M @ C - B) @ V[:, -K:]) <= 1e-9 * np.linalg.norm(B)
    assert np.linalg.norm((M - task_vectors.sum(0).numpy()) @ V[:, :-K]) <= 1e-9 * np.linalg.norm(M)


@pytest.mark.parametrize("name", ["swudi", "swudi_a"])
@every_shape
def test_one_expert_comes_back(shape: tuple[int, int], name: str) -> None:
    task_vectors = experts(1, *shape)
    assert error(merge(name, task_vectors), task_vectors[0]) <= 1e-9


@pytest.mark.parametrize("name", ["swudi", "swudi_a"])
def test_experts_that_read_different_inputs_are_summed(name: str) -> None:
    task_vectors = orthogonal_row_spaces(3, 10, 30, rank=6)
    assert error(merge(name, task_vectors), task_vectors.sum(0)) <= 1e-9


def test_copies_are_one_expert_where_they_are_corrected_and_their_sum_elsewhere() -> None:
    tau = experts(1, 12, 9)
    merged = run("swudi_a", tau.repeat(3, 1, 1))
    K = int(merged.facts["filtered_directions"])
    V = torch.linalg.svd(tau[0]).Vh[:K].T
    assert error(merged.delta @ V, tau[0] @ V) <= 1e-9
    rest = torch.eye(9, dtype=torch.float64) - V @ V.T
    assert error(merged.delta @ rest, 3 * tau[0] @ rest) <= 1e-9


def test_a_flat_spectrum_has_all_its_directions_and_no_more() -> None:
    flat = torch.stack([rotation(9, 1), rotation(9, 2)])[:, :, :5] @ torch.eye(5, 12, dtype=torch.float64)
    merged = run("swudi_a", flat)
    assert merged.facts["filtered_directions"] == 5
    assert error(merged.delta, merge("wudi", flat, mode="closed_form")) <= 1e-9
    assert run("swudi_a", flat.float()).facts["filtered_directions"] == 5


def test_adapters_have_no_directions_but_their_own() -> None:
    merged = run("swudi_a", low_rank(3, 30, 24, rank=2))
    assert int(merged.facts["filtered_directions"]) <= 6
