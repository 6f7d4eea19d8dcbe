"""RegMean, Fisher merging and AdaMerging: the kernels against plain float64 transcriptions, and what each must keep to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acemerge.calibration.measurements.adamerging import Learner
from acemerge.calibration.measurements.fisher import _scores, exact_scores
from acemerge.errors import InputError
from acemerge.methods import Context, get_method
from acemerge.methods.adamerging import AdaMergingOptions
from acemerge.methods.fisher import FisherOptions, merge_by_information
from acemerge.methods.regmean import merge_under_grams
from data_statistics import made_up_statistics

Array = np.ndarray[Any, np.dtype[np.float64]]
seeds = st.integers(0, 10_000)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_grams(tasks: int, n: int, seed: int, rows: int | None = None) -> list[Tensor]:
    return [x.T @ x / len(x) for x in random(tasks, rows or 4 * n + 3, n, seed=seed)]


# --- RegMean -----------------------------------------------------------------------------------------------------------


@given(shapes, seeds)
def test_regmean_solves_the_stacked_least_squares_problem(shape: tuple[int, int, int], seed: int) -> None:
    """a = 1: W minimises sum_t |X_t (W - W_t)^T|^2 / N_t."""
    tasks, out, n = shape
    counts = [3 * n + 2 + 5 * t for t in range(tasks)]
    X = [random(count, n, seed=seed + t) for t, count in enumerate(counts)]
    W0, W = random(out, n, seed=seed + 50), random(tasks, out, n, seed=seed + 51)
    rows = np.concatenate([x.numpy() / np.sqrt(len(x)) for x in X])
    answers = np.concatenate([(x @ w.T).numpy() / np.sqrt(len(x)) for x, w in zip(X, W, strict=True)])
    expected = np.linalg.lstsq(rows, answers)[0].T
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


# --- Fisher ------------------------------------------------------------------------------------------------------------


def softmax_regression(classes: int, seed: int) -> tuple[Tensor, Tensor]:
    return random(classes, 5, seed=seed).requires_grad_(), random(9, 5, seed=seed + 1)


def measured(W: Tensor, X: Tensor, options: FisherOptions, generator: torch.Generator | None = None, size: int = 1) -> Tensor:
    total = torch.zeros_like(W)
    for rows in torch.split(X, size):
        for weight, score in _scores(rows @ W.T, options, generator or torch.Generator()):
            (gradient,) = torch.autograd.grad(score, W, retain_graph=True)
            total += weight * gradient.square() / len(X)
    return total.detach()


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_exact_information_of_softmax_regression(classes: int) -> None:
    """F[c, j] = mean_x x_j^2 (p_c - p_c^2)."""
    W, X = softmax_regression(classes, seed=classes)
    p = (X @ W.T).softmax(1).detach()
    expected = torch.einsum("xj,xc->cj", X.square(), p - p.square()) / len(X)
    torch.testing.assert_close(measured(W, X, FisherOptions()), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 5])
def test_exact_information_is_the_sum_over_rows_and_classes(classes: int) -> None:
    """Of a model with two layers, against sum_y p_y (d log p_y)^2 row by row, class by class."""
    V, X = random(4, 5, seed=1).requires_grad_(), random(6, 5, seed=2)
    head = random(classes, 4, seed=3)
    expected, found = torch.zeros_like(V), torch.zeros_like(V)
    for x in X:
        log_p = ((V @ x).tanh() @ head.T).log_softmax(0)
        for y in range(classes):
            (gradient,) = torch.autograd.grad(log_p[y], V, retain_graph=True)
            expected += log_p[y].exp().detach() * gradient.square() / len(X)
        for weight, score in exact_scores(((V @ x).tanh() @ head.T)[None]):
            (gradient,) = torch.autograd.grad(score, V, retain_graph=True)
            found += weight * gradient.square() / len(X)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_two_classes_take_one_pass_and_a_regression_its_slope() -> None:
    assert len(list(exact_scores(torch.randn(1, 2)))) == 1
    ((weight, score),) = exact_scores(torch.tensor([[3.0]]))
    assert (weight, float(score)) == (1.0, 3.0)


def test_too_many_classes_are_refused_with_a_way_out() -> None:
    with pytest.raises(InputError, match="form=sampled"):
        list(exact_scores(torch.zeros(20, 1000)))


def test_sampled_information_is_right_on_average() -> None:
    W, X = softmax_regression(4, seed=9)
    exact, generator = measured(W, X, FisherOptions()), torch.Generator().manual_seed(0)
    draws = sum(measured(W, X, FisherOptions(form="sampled"), generator) for _ in range(2000)) / 2000
    torch.testing.assert_close(draws, exact, rtol=0.25, atol=0.05 * float(exact.max()))


def test_the_summed_gradient_is_not_the_information() -> None:
    """The square of the gradient of sum_x sum_y sqrt(p) log p, p being constant: nothing at all where p is uniform."""
    W, X = softmax_regression(4, seed=2)
    options = FisherOptions(form="summed_gradient")
    p = (X @ W.T).softmax(1).detach()
    root = p.sqrt()
    slopes = root - p * root.sum(1, keepdim=True)  # d/dz of sum_y sqrt(p_y) log p_y
    expected = (slopes.T @ X).square() / len(X)
    torch.testing.assert_close(measured(W, X, options, size=len(X)), expected)
    uniform = torch.zeros_like(W).requires_grad_()
    assert measured(uniform, X, options, size=len(X)).abs().max() < 1e-20
    assert measured(uniform, X, FisherOptions()).min() > 0


@given(shapes, seeds)
def test_fisher_is_its_formula_and_stays_between_the_experts(shape: tuple[int, int, int], seed: int) -> None:
    tasks = shape[0]
    task_vectors, F = random(*shape, seed=seed), random(*shape, seed=seed + 1).square()
    weights = [1.0 + t for t in range(tasks)]
    c = np.array(weights).reshape(-1, 1, 1)
    expected = (c * F.numpy() * task_vectors.numpy()).sum(0) / (c * F.numpy()).sum(0)
    found = merge_by_information(task_vectors, list(F), weights, 1e-12)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert (found >= task_vectors.amin(0) - 1e-12).all()
    assert (found <= task_vectors.amax(0) + 1e-12).all()


@given(shapes, seeds)
def test_equal_or_missing_information_gives_the_mean(shape: tuple[int, int, int], seed: int) -> None:
    task_vectors, F = random(*shape, seed=seed), random(*shape[1:], seed=seed + 1).square()
    for information in ([F] * shape[0], [None] * shape[0]):
        found = merge_by_information(task_vectors, information, [1.0] * shape[0], 1e-6)
        torch.testing.assert_close(found, task_vectors.mean(0))


def test_fisher_turns_its_information_as_the_task_vectors_are_turned() -> None:
    fisher, task_vectors = get_method("fisher"), random(3, 4, 6, seed=1)
    known = made_up_statistics(fisher, task_vectors)
    names, options = ("a", "b", "c"), fisher.options({})
    straight = fisher(task_vectors, options, Context("w", names, statistics=known)).delta
    turned = fisher(task_vectors.transpose(1, 2), options, Context("w", names, statistics=known, transposed=True)).delta
    torch.testing.assert_close(turned.T, straight)


def test_weights_of_fisher_are_checked() -> None:
    fisher = get_method("fisher")
    with pytest.raises(InputError, match="all 0"):
        fisher.options({"weights": [0, 0]}).check(2)
    with pytest.raises(InputError, match="3 experts"):
        fisher.options({"weights": [1, 2]}).check(3)


# --- AdaMerging --------------------------------------------------------------------------------------------------------


@given(shapes, seeds)
def test_adamerging_is_a_sum_with_its_coefficients(shape: tuple[int, int, int], seed: int) -> None:
    adamerging, task_vectors = get_method("adamerging"), random(*shape, seed=seed)
    names = tuple("abcd"[: shape[0]])
    known = made_up_statistics(adamerging, task_vectors)
    assert known is not None
    merged = adamerging(task_vectors, adamerging.options({}), Context("w", names, statistics=known))
    expected = sum(known.coefficient(name, "w") * task_vectors[t] for t, name in enumerate(names))
    torch.testing.assert_close(merged.delta, expected)
    assert merged.facts["coefficient of a"] == known.coefficient("a", "w")


@pytest.mark.parametrize("granularity", ["layer", "task"])
def test_the_first_step_of_adam_goes_against_the_slopes(granularity: Any) -> None:
    learner = Learner.new(AdaMergingOptions(granularity=granularity, learning_rate=0.01), 2, 3)
    learner.learn(torch.tensor([[1.0, 2.0, 0.5], [-1.0, -2.0, -3.0]], dtype=torch.float64))
    expected = torch.tensor([[0.29] * 3, [0.31] * 3], dtype=torch.float64)
    torch.testing.assert_close(learner.coefficients(), expected, rtol=0, atol=1e-6)


def test_coefficients_are_cut_and_then_stay() -> None:
    learner = Learner.new(AdaMergingOptions(start=0.0, learning_rate=0.1), 1, 1)
    slope = torch.ones(1, 1, dtype=torch.float64)
    learner.learn(slope)
    assert learner.raw.item() < 0
    assert learner.coefficients().item() == 0.0
    learner.learn(-slope)
    assert learner.coefficients().item() == 0.0, "a cut coefficient has no slope"
    free = Learner.new(AdaMergingOptions(start=0.0, learning_rate=0.1, clamp=False), 1, 1)
    free.learn(slope)
    assert free.coefficients().item() < 0


def test_a_learner_goes_on_where_it_stopped() -> None:
    slopes = random(6, 2, 3, seed=4)
    whole, first = (Learner.new(AdaMergingOptions(), 2, 3) for _ in range(2))
    for slope in slopes:
        whole.learn(slope)
    for slope in slopes[:4]:
        first.learn(slope)
    second = Learner.new(AdaMergingOptions(), 2, 3)
    assert second.take_up({name: tensor.clone() for name, tensor in first.state(4).items()}) == 4
    for slope in slopes[4:]:
        second.learn(slope)
    assert second.coefficients().equal(whole.coefficients())
