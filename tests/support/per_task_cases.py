"""EMR, TALL masks and Twin as plain float64 transcriptions, and task vectors to compare them on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acemerge.methods import Context, Merged, get_method

Array = np.ndarray[Any, np.dtype[np.float64]]
Tensors = dict[str, Tensor]
METHODS = ["emr", "tall_mask", "twin"]
every_method = pytest.mark.parametrize("method", METHODS)
SHAPES = [(12, 8), (3, 20), (5,), (), (2, 3, 2, 2)]
PRECISIONS = {torch.float32: 1e-4, torch.float64: 1e-9}


def reference_emr(taus: Mapping[str, Array], rescale: str = "global") -> list[dict[str, Array]]:
    masked: list[dict[str, Array]] = [{} for _ in next(iter(taus.values()))]
    for name, tau in taus.items():
        g = np.where(tau.sum(0) > 0, 1.0, -1.0)
        m = tau * g > 0
        tau_u = g * np.abs(m * tau).max(0)
        for t, own in enumerate(masked):
            own[name] = m[t] * tau_u
    changes = []
    for t, own in enumerate(masked):
        size = {name: x.size if rescale == "tensor_means" else 1 for name, x in own.items()}
        top = sum(np.abs(tau[t]).sum() / size[name] for name, tau in taus.items())
        bottom = sum(np.abs(x).sum() / size[name] for name, x in own.items())
        changes.append({name: np.asarray((top / bottom if bottom > 0 else 0.0) * x) for name, x in own.items()})
    return changes


def reference_tall_mask(taus: Mapping[str, Array], mask_lambda: float = 0.4) -> list[dict[str, Array]]:
    changes: list[dict[str, Array]] = [{} for _ in next(iter(taus.values()))]
    for name, tau in taus.items():
        tau_M = tau.sum(0)
        for t, own in enumerate(changes):
            own[name] = np.asarray(tau_M * (np.abs(tau[t]) > mask_lambda * np.abs(tau_M - tau[t])))
    return changes


def reference_twin(taus: Mapping[str, Array], rank_share: float = 0.1, alpha: float = 0.3) -> list[dict[str, Array]]:
    changes: list[dict[str, Array]] = [{} for _ in next(iter(taus.values()))]
    for name, tau in taus.items():
        shared = alpha * tau.sum(0)
        for t, own in enumerate(changes):
            exclusive = tau[t] - shared
            if exclusive.ndim == 2:
                U, s, Vh = np.linalg.svd(exclusive, full_matrices=False)
                k = max(1, round(math.floor(1e6 * rank_share * len(s)) / 1e6 // 1)) if rank_share else 0
                exclusive = (U[:, :k] * s[:k]) @ Vh[:k]
            elif not rank_share:
                exclusive = exclusive * 0
            own[name] = np.asarray(shared + exclusive)
    return changes


REFERENCES: dict[str, Callable[..., list[dict[str, Array]]]] = {
    "emr": reference_emr,
    "tall_mask": reference_tall_mask,
    "twin": reference_twin,
}


def reference_shared(method: str, tau: Array) -> Array:
    """M, unscaled."""
    g = np.where(tau.sum(0) > 0, 1.0, -1.0)
    return np.asarray(g * np.abs((tau * g > 0) * tau).max(0) if method == "emr" else tau.sum(0))


def random_task_vectors(*shape: int, tasks: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(tasks)]).view(-1, *[1] * len(shape))
    return (torch.randn(tasks, *shape, generator=generator) * strengths).to(dtype)


def run(method: str, task_vectors: Tensor, **options: Any) -> Merged:
    chosen = get_method(method)
    names = tuple(f"e{t}" for t in range(len(task_vectors)))
    return chosen(task_vectors, chosen.options(options), Context("layer.weight", names))


def rebuilt(merged: Merged, task: int) -> Tensor:
    """W_task - W0, by what `Merged` says of parts."""
    part = merged.parts[task]
    if "mask" in part:
        assert merged.shared is not None
        return part["scale"] * part["mask"] * merged.shared.double()
    change = merged.delta.double()
    if "left" in part:
        change = change + part["left"] @ part["right"]
    return change + part["delta"] if "delta" in part else change


def changes(method: str, task_vectors: Tensor, **options: Any) -> list[Tensor]:
    merged = run(method, task_vectors, **options)
    return [rebuilt(merged, t) for t in range(len(task_vectors))]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("emr", {}),
    ("emr", {"rescale": "tensor_means"}),
    ("tall_mask", {}),
    ("tall_mask", {"mask_lambda": 1.1}),
    ("twin", {}),
    ("twin", {"rank_share": 0.4, "alpha": 0.5}),
    ("twin", {"rank_share": 0.9}),
    ("twin", {"rank_share": 0.0}),
    ("twin", {"rank_share": 1.0}),
]
