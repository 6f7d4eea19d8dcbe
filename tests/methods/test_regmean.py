"""RegMean's kernel against plain float64 transcriptions, and what it must keep to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.methods import Context, get_method
from acemerge.methods.regmean import merge_under_grams
from random_statistics import random, random_grams, seeds, shapes

Array = np.ndarray[Any, np.dtype[np.float64]]


@given(shapes, seeds)
def test_regmean_solves_the_stacked_least_squares_problem(shape: tuple[int, int, int], seed: int) -> None:
    """a = 1: W minimises sum_t |X_t (W - W_t)^T|^2 / N_t."""
    tasks, out, n = shape
    counts = [3 * n + 2 + 5 * t for t in range(tasks)]
    X = [random(count, n, seed=seed + t) for t, count in enumerate(counts)]
    W0, W = random(out, n, seed=seed + 50), random(tasks, out, n, seed=seed + 51)
    rows = np.concatenate([x.numpy() / np.sqrt(len(x)) for x in X])
    answers = np.concatenate([(x @ w.T).numpy() / np.sqrt(len(x)) for x, w in zip(X, W, strict=True)])
    expected = np.linalg.lstsq(rows, answers, rcond=None)[0].T
    found = W0 + merge_under_grams(W - W0, [x.T @ x / len(x) for x in X], 1.0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-4 * max(1.0, np.abs(expected).max()))


@given(shapes, seeds, st.floats(0, 1))
def test_regmean_is_its_formula(shape: tuple[int, int, int], seed: int, share: float) -> None:
    tasks, out, n = shape
    task_vectors, grams = random(tasks, out, n, seed=seed), random_grams(tasks, n, seed)
    H = [share * g + (1 - share) * g.diag().diag() for g in grams]
    expected = sum(t @ h for t, h in zip(task_vectors, H, strict=True)) @ torch.linalg.inv(sum(H))
    found = merge_under_grams(task_vectors, grams, share)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@given(shapes, seeds, st.floats(0, 1))
def test_regmean_under_equal_grams_is_the_mean(shape: tuple[int, int, int], seed: int, share: float) -> None:
    """Also where the Gram matrix is singular: fewer inputs than features."""
    tasks, out, n = shape
    task_vectors, gram = random(tasks, out, n, seed=seed), random_grams(1, n, seed, rows=max(1, n // 2))[0]
    torch.testing.assert_close(merge_under_grams(task_vectors, [gram] * tasks, share), task_vectors.mean(0), rtol=1e-6, atol=1e-7)


@given(shapes, seeds)
def test_regmean_without_off_diagonals_weighs_columns(shape: tuple[int, int, int], seed: int) -> None:
    tasks, out, n = shape
    task_vectors, grams = random(tasks, out, n, seed=seed), random_grams(tasks, n, seed)
    weights = torch.stack([g.diagonal() for g in grams])
    expected = (task_vectors * weights[:, None]).sum(0) / weights.sum(0)
    torch.testing.assert_close(merge_under_grams(task_vectors, grams, 0.0), expected, rtol=0, atol=1e-4)


@given(shapes, seeds, st.floats(0, 1), st.floats(1e-3, 1e3), st.randoms())
def test_regmean_knows_no_order_and_no_unit(
    shape: tuple[int, int, int], seed: int, share: float, unit: float, shuffler: Any
) -> None:
    tasks, out, n = shape
    task_vectors, grams = random(tasks, out, n, seed=seed), random_grams(tasks, n, seed)
    order = list(range(tasks))
    shuffler.shuffle(order)
    found = merge_under_grams(task_vectors[order], [unit * grams[t] for t in order], share)
    torch.testing.assert_close(found, merge_under_grams(task_vectors, grams, share), rtol=1e-6, atol=1e-8)


def test_regmean_returns_a_single_expert_however_little_it_saw() -> None:
    task_vectors = random(1, 5, 8, seed=3)
    for gram in (random_grams(1, 8, 1, rows=2)[0], torch.zeros(8, 8, dtype=torch.float64), None):
        torch.testing.assert_close(merge_under_grams(task_vectors, [gram], 1.0), task_vectors[0], rtol=1e-9, atol=1e-9)


def test_regmean_averages_a_feature_that_nobody_saw() -> None:
    task_vectors, grams = random(3, 4, 6, seed=1), random_grams(3, 6, 2)
    for gram in grams:
        gram[2], gram[:, 2] = 0, 0
    found = merge_under_grams(task_vectors, grams, 1.0)
    torch.testing.assert_close(found[:, 2], task_vectors[:, :, 2].mean(0), rtol=1e-6, atol=1e-8)


def test_regmean_says_when_no_row_came_to_a_layer() -> None:
    class Nothing:
        def of(self, expert: str, tensor: str) -> None:
            return None

    regmean, task_vectors = get_method("regmean"), random(2, 3, 4, seed=0)
    merged = regmean(task_vectors, regmean.options({}), Context("w", ("a", "b"), statistics=Nothing()))
    torch.testing.assert_close(merged.delta, task_vectors.mean(0))
    assert merged.warnings == ("no row came to this layer in a, b; it is averaged",)
