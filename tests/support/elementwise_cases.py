"""Task vectors for entry-by-entry methods, whole models of them, and how merges are compared with the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from acemerge.methods import Context, Merged, Options, get_method
from small_models import base_tensors, fine_tuned

Array = NDArray[np.float64]
NAMES = tuple("abcdefgh")
SHAPES = [(), (7,), (12, 8), (8, 12), (1, 9), (3, 2, 5)]
CASES = [*((shape, torch.float64) for shape in SHAPES), *((shape, torch.float32) for shape in [(7,), (12, 8), (3, 2, 5)])]
every_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda v: str(v).removeprefix("torch."))


def random_tasks(tasks: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(tasks)], dtype=torch.float64)
    drawn = torch.randn(tasks, *shape, generator=generator, dtype=torch.float64) * strengths.view(-1, *[1] * len(shape))
    return drawn.to(dtype)


@cache
def options_of(name: str, **given: Any) -> Options:
    """Validating is slow; alpha is 1 unless given, so that results are M itself."""
    return get_method(name).options({"alpha": 1.0, **given}).resolve({})


def run(
    name: str,
    task_vectors: Tensor,
    *,
    base: Tensor | None = None,
    tensor: str = "w",
    names: Sequence[str] = NAMES,
    **options: Any,
) -> Merged:
    context = Context(tensor, tuple(names[: len(task_vectors)]), base)
    return get_method(name)(task_vectors, options_of(name, **options), context)


def mean_over_seeds(name: str, task_vectors: Tensor, repeats: int, **options: Any) -> Tensor:
    chosen: Any = options_of(name, **options)
    total = torch.zeros_like(task_vectors[0])
    for seed in range(repeats):
        total += get_method(name)(task_vectors, replace(chosen, seed=seed), Context("w", NAMES[: len(task_vectors)])).delta
    return total / repeats


def assert_matches(merged: Tensor, expected: Array | Tensor, dtype: torch.dtype) -> None:
    """1e-4 relative to the largest entry in float32 (in fact much closer), 1e-9 in float64."""
    reference = torch.as_tensor(expected, dtype=torch.float64)
    assert merged.shape == reference.shape
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(merged.double(), reference, rtol=tolerance, atol=tolerance * float(reference.abs().max()))


def flatten(tensors: Mapping[str, Tensor]) -> Array:
    return np.concatenate([tensors[n].double().numpy().reshape(-1) for n in sorted(tensors) if tensors[n].is_floating_point()])


def small_model(experts: int = 3, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    base = {n: w.to(dtype) if w.is_floating_point() else w for n, w in base_tensors().items()}
    return base, {name: fine_tuned(base, i) for i, name in zip(range(experts), NAMES, strict=False)}


def differences(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """tau_t in the dtype of the files, as the engine forms them."""
    return {t: {n: expert[n] - base[n] for n in base} for t, expert in experts.items()}


def assert_whole_model(merged: Mapping[str, Tensor], base: Mapping[str, Tensor], delta: Array, alpha: float) -> None:
    np.testing.assert_allclose(flatten(merged), flatten(base) + alpha * delta, rtol=0, atol=1e-6)


def draws(tensor: str, expert: str, shape: Sequence[int], seed: int = 0) -> Array:
    """The random numbers in [0, 1) that belong to a seed, an expert and a tensor."""
    generator = Context(tensor, (expert,)).generator(seed, 0)
    drawn: Array = torch.rand(tuple(shape), generator=generator, dtype=torch.float32).double().numpy()
    return drawn
