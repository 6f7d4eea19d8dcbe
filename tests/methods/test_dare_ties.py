"""DARE with TIES against its steps, on single tensors and whole models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import acemerge
from elementwise_cases import (
    NAMES,
    assert_matches,
    assert_whole_model,
    differences,
    draws,
    every_case,
    random_tasks,
    run,
    small_model,
)
from elementwise_references import dare_reference, ties_reference


@pytest.mark.parametrize("keep", [0.2, 0.8, 1.0])
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
@pytest.mark.parametrize("rescale", ["inverse", "l1"])
def test_dare_ties_of_a_whole_model(keep: float, merge: str, scope: str, rescale: str) -> None:
    """The thresholds and the majority sign are those of the dropped vectors."""
    base, experts = small_model(dtype=torch.float64)
    names = [n for n in sorted(base) if base[n].is_floating_point()]
    merged = acemerge.merge_state_dicts(
        base, experts, method="dare_ties", drop=0.4, keep=keep, merge=merge, scope=scope, rescale=rescale, seed=2
    )
    vectors = [
        np.concatenate(
            [dare_reference(tau[n].double().numpy(), draws(n, t, base[n].shape, 2), 0.4, rescale).reshape(-1) for n in names]
        )
        for t, tau in differences(base, experts).items()
    ]
    pieces = [base[n].numel() for n in names] if scope == "tensor" else None
    assert_whole_model(merged, base, ties_reference(vectors, keep, merge, pieces), 1.0)


@every_case
def test_dare_ties_against_its_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tau = random_tasks(4, *shape, dtype=dtype)
    dropped = [dare_reference(tau[t].double().numpy(), draws("w", NAMES[t], shape), 0.3, "inverse").reshape(-1) for t in range(4)]
    expected = ties_reference(dropped, 0.4, "mean").reshape(shape)
    assert_matches(run("dare_ties", tau, drop=0.3, keep=0.4).delta, expected, dtype)


def test_dare_ties_trims_nothing_when_dropping_leaves_less() -> None:
    tau = random_tasks(3, 30, 30)
    loose, all_of_it = (run("dare_ties", tau, drop=0.8, keep=keep).delta for keep in (0.5, 1.0))
    assert loose.equal(all_of_it)
