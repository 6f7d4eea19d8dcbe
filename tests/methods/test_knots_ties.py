"""KnOTS-TIES against its transcription, on single tensors and whole models."""

from typing import Any

import numpy as np
import pytest
import torch

from acemerge import merge_state_dicts, merge_task_vectors
from acemerge.methods import Context
from acemerge.methods.knots_ties import KnotsTiesOptions, align
from spectral_cases import SHAPES, TOLERANCE, Array, deltas, error, every_shape, experts, low_rank, merge, run, small_model
from spectral_references import reference_knots, reference_ties


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
