"""MINGLE's experts and mixture against plain transcriptions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acemerge.calibration.measurements.mingle import Gate
from acemerge.methods import Context, get_method
from acemerge.methods.mingle import MingleOptions, low_rank_experts, what_is_new
from data_statistics import made_up_statistics
from random_statistics import random


def projected(tau: Tensor, earlier: Tensor) -> Tensor:
    """P(tau) in whole bases, as the authors' release has it: the diagonal and the leading block go."""
    U, s, Vh = torch.linalg.svd(earlier, full_matrices=True)
    p = s / s.sum()
    K = int(math.exp(-float((p * p.log()).sum())))
    C = U.T @ tau @ Vh.T
    for i in range(min(C.shape)):
        C[i, i] = 0
    C[:K, :K] = 0
    found: Tensor = U @ C @ Vh
    return found


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
def test_what_is_new_is_the_projection(shape: tuple[int, int]) -> None:
    tau, earlier = random(*shape, seed=1), random(*shape, seed=2)
    torch.testing.assert_close(what_is_new(tau, earlier), projected(tau, earlier), rtol=1e-9, atol=1e-9)
    assert what_is_new(tau, torch.zeros_like(tau)) is tau


def test_what_was_there_before_is_not_new() -> None:
    """Directions with equal singular values: all of an expert's own."""
    U, _ = torch.linalg.qr(random(9, 3, seed=1))
    V, _ = torch.linalg.qr(random(7, 3, seed=2))
    earlier = U @ V.T
    again = U @ random(3, 3, seed=3) @ V.T
    assert what_is_new(again, earlier).norm() < 1e-9
    other = random(9, 7, seed=4)
    rest = what_is_new(other, earlier)
    assert (U.T @ rest @ V).norm() < 1e-9
    assert rest.norm() <= other.norm()


def test_experts_are_cut_to_low_rank_one_after_the_other() -> None:
    task_vectors = random(3, 8, 6, seed=5)
    experts = low_rank_experts(task_vectors, 2)
    expected: list[Tensor] = []
    earlier = torch.zeros(8, 6, dtype=torch.float64)
    for tau in task_vectors:
        new = tau if not expected else what_is_new(tau, earlier)
        U, s, Vh = torch.linalg.svd(new, full_matrices=False)
        expected.append(U[:, :2] @ torch.diag(s[:2]) @ Vh[:2])
        earlier = earlier + expected[-1]
    torch.testing.assert_close(torch.stack(experts), torch.stack(expected), rtol=1e-9, atol=1e-9)
    assert all(int(torch.linalg.matrix_rank(expert)) == 2 for expert in experts)


def test_every_task_has_its_gates_and_the_shared_model_is_their_mean() -> None:
    mingle, task_vectors = get_method("mingle"), random(3, 8, 6, seed=6)
    known = made_up_statistics(mingle, task_vectors)
    assert known is not None
    names = ("a", "b", "c")
    merged = mingle(task_vectors, mingle.options({"directions": 3}), Context("w", names, statistics=known))
    experts = low_rank_experts(task_vectors, 3)
    own = [sum(g * f for g, f in zip(known.gates(task, "w", names), experts, strict=True)) for task in names]
    for task, expected in enumerate(own):
        torch.testing.assert_close(merged.delta + merged.parts[task]["delta"], torch.as_tensor(expected))
    torch.testing.assert_close(merged.delta, torch.stack([torch.as_tensor(each) for each in own]).mean(0))


def test_gradients_are_kept_from_what_earlier_tasks_look_like() -> None:
    U, _ = torch.linalg.qr(random(6, 2, seed=7))
    gate, options = Gate(torch.zeros(1, 3, 6, dtype=torch.float64)), MingleOptions(gamma=1.5, beta=0.9)
    gradient = random(6, seed=8)
    torch.testing.assert_close(gate.project(gradient, options), gradient)
    gate.span, S = U, torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        g = random(6, seed=10 + step)
        S = 0.9 * S + 0.1 * torch.stack([abs(u @ g) / g.norm() for u in U.T])
        P = torch.eye(6, dtype=torch.float64) - U @ torch.diag(torch.exp(-1.5 * S)) @ U.T
        torch.testing.assert_close(gate.project(g, options), P @ g)
    hard = Gate(torch.zeros(1, 3, 6, dtype=torch.float64), span=U)
    assert (U.T @ hard.project(gradient, MingleOptions(gamma=0.0))).norm() < 1e-12


def test_spans_grow_by_what_is_new_of_the_inputs() -> None:
    gate = Gate(torch.zeros(1, 2, 5, dtype=torch.float64))
    eye = torch.eye(5, dtype=torch.float64)
    gate.remember(torch.diag(torch.tensor([5.0, 1, 4, 0, 0], dtype=torch.float64)), 2)
    assert gate.span is not None
    torch.testing.assert_close(gate.span @ gate.span.T, eye[:, [0, 2]] @ eye[:, [0, 2]].T)
    gate.remember(torch.diag(torch.tensor([5.0, 4, 1, 0, 0], dtype=torch.float64)), 2)
    torch.testing.assert_close(gate.span @ gate.span.T, torch.diag(torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64)))
    assert gate.span.shape == (5, 3)
