"""Task vectors and whole models for Consensus TA, NAN and FR, and how merges are compared with the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from acemerge.methods import Context, Merged, get_method
from small_models import base_tensors, fine_tuned

Array = np.ndarray[Any, np.dtype[np.float64]]
SHAPES = [(12, 8), (3, 20), (5,), (), (2, 3, 2, 2)]
PRECISIONS = {torch.float32: 1e-4, torch.float64: 1e-9}


def random_task_vectors(*shape: int, tasks: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(tasks)]).view(-1, *[1] * len(shape))
    return (torch.randn(tasks, *shape, generator=generator) * strengths).to(dtype)


def run(method: str, task_vectors: Tensor, base: Tensor | None = None, **options: Any) -> Merged:
    chosen = get_method(method)
    names = tuple(f"e{t}" for t in range(len(task_vectors)))
    return chosen(task_vectors, chosen.options(options), Context("layer.weight", names, base))


def assert_relative(found: Tensor, expected: Array | Tensor, tolerance: float, size: Tensor | None = None) -> None:
    """Within a share of the expected value's size, or of the size given where what is added may cancel."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    error, size = (found.double() - wanted).norm(), wanted.norm() if size is None else size
    assert error <= tolerance * size, f"off by {error / size:.3g} of its size"


def whole_model(experts: int = 3) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    base = base_tensors()
    return base, {f"e{i}": fine_tuned(base, i, strength=0.03 * (1 + i)) for i in range(experts)}


def weights_of(base: dict[str, Tensor]) -> list[str]:
    return [name for name, weight in base.items() if weight.is_floating_point()]


def flattened(base: dict[str, Tensor], experts: dict[str, dict[str, Tensor]]) -> Array:
    """Each expert's task vector of the whole model, float32 differences as the engine takes them."""
    names = weights_of(base)
    rows = [torch.cat([(expert[name] - base[name]).reshape(-1) for name in names]) for expert in experts.values()]
    return torch.stack(rows).double().numpy()


def unflattened(flat: Array, base: dict[str, Tensor]) -> dict[str, Tensor]:
    sizes = [base[name].numel() for name in weights_of(base)]
    pieces = torch.split(torch.from_numpy(flat), sizes)
    return {name: piece.reshape(base[name].shape) for name, piece in zip(weights_of(base), pieces, strict=True)}


def assert_merges_to(base: dict[str, Tensor], merged: dict[str, Tensor], change: Array, tolerance: float = 1e-5) -> None:
    for name, expected in unflattened(change, base).items():
        error = (merged[name].double() - base[name].double() - expected).abs().max()
        rounding = torch.finfo(torch.float32).eps * base[name].abs().max()
        assert error <= tolerance * abs(change).max() + rounding, name
