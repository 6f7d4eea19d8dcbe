"""Fisher merging's kernel against plain float64 transcriptions, and what it must keep to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from acemerge.calibration.measurements.fisher import _scores, exact_scores
from acemerge.errors import InputError
from acemerge.methods import Context, get_method
from acemerge.methods.fisher import FisherOptions, merge_by_information
from data_statistics import made_up_statistics
from random_statistics import random, seeds, shapes


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
    """Two thousand draws, each with a copy of the weights: one pass back gives every draw's own gradient."""
    W, X = softmax_regression(4, seed=9)
    copies, generator = W.detach().expand(2000, -1, -1).clone().requires_grad_(), torch.Generator().manual_seed(0)
    found = torch.zeros_like(W)
    for x in X:
        ((weight, score),) = _scores(copies @ x, FisherOptions(form="sampled"), generator)
        (gradients,) = torch.autograd.grad(score, copies)
        found += weight * gradients.square().mean(0) / len(X)
    exact = measured(W, X, FisherOptions())
    torch.testing.assert_close(found, exact, rtol=0.25, atol=0.05 * float(exact.max()))


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


def test_scales_are_dynamic_fishers_formula() -> None:
    """theta_0 + T sum_t F_t s_t tau_t / sum_t F_t, with alpha = T."""
    fisher, task_vectors = get_method("fisher"), random(3, 4, 6, seed=1)
    known = made_up_statistics(fisher, task_vectors)
    assert known is not None
    F = torch.stack([known.of(name, "w") for name in "abc"]).clamp_min(1e-6)
    scales = torch.tensor([0.3, 0.0, 1.2]).reshape(-1, 1, 1)
    expected = 3 * (F * scales * task_vectors).sum(0) / F.sum(0)
    context = Context("w", ("a", "b", "c"), statistics=known)
    found = fisher(task_vectors, fisher.options({"scales": "0.3,0,1.2", "alpha": 3}), context).delta
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_fisher_turns_its_information_as_the_task_vectors_are_turned() -> None:
    fisher, task_vectors = get_method("fisher"), random(3, 4, 6, seed=1)
    known = made_up_statistics(fisher, task_vectors)
    names, options = ("a", "b", "c"), fisher.options({})
    straight = fisher(task_vectors, options, Context("w", names, statistics=known)).delta
    turned = fisher(task_vectors.transpose(1, 2), options, Context("w", names, statistics=known, to_method=torch.t)).delta
    torch.testing.assert_close(turned.T, straight)


def test_weights_of_fisher_are_checked() -> None:
    fisher = get_method("fisher")
    with pytest.raises(InputError, match="all 0"):
        fisher.options({"weights": [0, 0]}).check(2)
    with pytest.raises(InputError, match="3 experts"):
        fisher.options({"weights": [1, 2]}).check(3)
    with pytest.raises(InputError, match=r"scales=\[1.0, 2.0\] are 2 numbers for 3 experts"):
        fisher.options({"scales": [1, 2]}).check(3)
