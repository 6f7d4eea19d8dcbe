"""WUDI against automatic differentiation and torch's Adam, and its descent towards the closed form."""

import pytest
import torch

from acemerge import merge_state_dicts
from spectral_cases import check, error, every_shape, experts, gaussian, merge
from spectral_references import reference_wudi, wudi_loss


@pytest.mark.parametrize("tasks", [2, 4])
@every_shape
def test_wudi_agrees_with_automatic_differentiation_and_adam(shape: tuple[int, int], tasks: int) -> None:
    check("wudi", experts(tasks, *shape), reference_wudi, steps=40, lr=2e-5)


def test_wudi_agrees_with_its_published_defaults() -> None:
    check("wudi", experts(3, 10, 8), reference_wudi)
    assert error(merge("wudi", experts(3, 10, 8)), reference_wudi(experts(3, 10, 8).numpy(), steps=300, lr=1e-5)) <= 1e-9


def test_wudi_without_steps_is_the_sum() -> None:
    task_vectors = experts(3, 10, 8)
    assert error(merge("wudi", task_vectors, steps=0), task_vectors.sum(0)) <= 1e-15


@every_shape
def test_wudi_of_one_expert_is_that_expert(shape: tuple[int, int]) -> None:
    task_vectors = experts(1, *shape)
    assert error(merge("wudi", task_vectors, steps=20), task_vectors[0]) <= 1e-12


@every_shape
def test_wudi_closed_form_minimises_its_loss(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape, decay=0.0)
    best = merge("wudi", task_vectors, mode="closed_form")
    loss = float(wudi_loss(best, task_vectors))
    M = best.clone().requires_grad_(True)
    wudi_loss(M, task_vectors).backward()
    at_zero = torch.zeros_like(best).requires_grad_(True)
    wudi_loss(at_zero, task_vectors).backward()
    assert M.grad is not None
    assert at_zero.grad is not None
    assert M.grad.norm() <= 1e-10 * at_zero.grad.norm()
    others = [task_vectors.sum(0), task_vectors.mean(0), *(best + 1e-4 * gaussian(*shape, seed=s) for s in range(5))]
    assert all(loss <= float(wudi_loss(other, task_vectors)) + 1e-15 for other in others)


def test_wudi_descends_towards_the_closed_form() -> None:
    task_vectors = experts(3, 12, 8, decay=0.0)
    least = float(wudi_loss(merge("wudi", task_vectors, mode="closed_form"), task_vectors))
    start, published = (float(wudi_loss(merge("wudi", task_vectors, steps=s), task_vectors)) for s in (0, 300))
    converged = merge("wudi", task_vectors, steps=3000, lr=1e-4)
    assert start > published > least
    assert float(wudi_loss(converged, task_vectors)) == pytest.approx(least, rel=1e-3)


def test_wudi_leaves_other_tensors_at_the_base_and_actmat_averages_them() -> None:
    base = {"a.weight": gaussian(6, 8), "a.bias": gaussian(6, seed=1)}
    tuned = [{name: w + 0.01 * gaussian(*w.shape, seed=10 + i) for name, w in base.items()} for i in range(3)]
    assert merge_state_dicts(base, tuned, method="wudi")["a.bias"].equal(base["a.bias"])
    average = sum(expert["a.bias"] for expert in tuned) / 3
    torch.testing.assert_close(merge_state_dicts(base, tuned, method="actmat")["a.bias"], average)
