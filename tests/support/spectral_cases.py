"""Task vectors for methods built on singular vectors and Gram matrices, and how their merges are compared."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from acemerge import merge_task_vectors
from acemerge.methods import Merged, get_method

Array = NDArray[np.float64]
SHAPES = {"square": (12, 12), "wide": (8, 18), "very wide": (4, 40), "tall": (20, 9)}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
SPECTRAL = ("cart", "tsv_m", "iso_c", "iso_cts", "wudi", "actmat", "knots_ties", "core_space", "swudi", "swudi_a")
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def experts(tasks: int, rows: int, cols: int, *, decay: float = 0.5, seed: int = 0) -> Tensor:
    """Task vectors of different length, whose rows share an input covariance with singular values i^-decay."""
    basis = rotation(cols, seed)
    spectrum = torch.arange(1, cols + 1, dtype=torch.float64) ** -decay
    lengths = torch.tensor([0.02 * 1.4**t for t in range(tasks)], dtype=torch.float64)
    vectors: Tensor = gaussian(tasks, rows, cols, seed=seed + 1) @ (basis * spectrum) @ basis.T
    return vectors * lengths[:, None, None]


def low_rank(tasks: int, rows: int, cols: int, rank: int, *, seed: int = 0) -> Tensor:
    """LoRA-like task vectors B_t A_t on a dyadic grid: exactly of that rank in float32 too."""
    B = torch.randint(-8, 9, (tasks, rows, rank), generator=generator(seed)).double()
    A = torch.randint(-8, 9, (tasks, rank, cols), generator=generator(seed + 1)).double()
    return B @ A * torch.tensor([2.0 ** -(8 + t % 3) for t in range(tasks)], dtype=torch.float64)[:, None, None]


def orthogonal_row_spaces(tasks: int, rows: int, cols: int, rank: int) -> Tensor:
    frame = torch.linalg.qr(gaussian(cols, cols, seed=5)).Q
    return torch.stack([gaussian(rows, rank, seed=t) @ frame[:, t * rank : (t + 1) * rank].T for t in range(tasks)])


def rotation(size: int, seed: int) -> Tensor:
    Q: Tensor = torch.linalg.qr(gaussian(size, size, seed=seed)).Q
    return Q


def run(name: str, task_vectors: Tensor, **options: Any) -> Merged:
    method = get_method(name)
    return method(task_vectors, method.options({"alpha": 1.0, **options}).resolve({}))


def merge(name: str, task_vectors: Tensor, **options: Any) -> Tensor:
    return merge_task_vectors(task_vectors, method=name, **{"alpha": 1.0, **options})


def error(actual: Tensor, expected: Tensor | Array) -> float:
    """The relative Frobenius error."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return float(torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected))


def check(name: str, task_vectors: Tensor, reference: Callable[..., Array], **options: Any) -> None:
    """Compare with the transcription on the very numbers given to the merge, in both precisions."""
    for dtype, tolerance in TOLERANCE.items():
        given_vectors = task_vectors.to(dtype)
        actual = merge(name, given_vectors, **options)
        assert actual.dtype == dtype
        assert error(actual, reference(given_vectors.double().numpy(), **options)) <= tolerance


def small_model(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Matrices of several shapes, one that nobody changed, and a vector."""
    shapes: dict[str, tuple[int, ...]] = {"a.weight": (9, 12), "b.weight": (14, 6), "c.weight": (5, 5), "d.bias": (7,)}
    base = {name: gaussian(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}
    scales = {"a.weight": 0.02, "b.weight": 0.05, "c.weight": 0.0, "d.bias": 0.1}
    tuned = {
        expert: {
            name: (w.double() + scales[name] * gaussian(*w.shape, seed=100 * i + j)).to(dtype)
            for j, (name, w) in enumerate(base.items())
        }
        for i, expert in enumerate("xyz", 1)
    }
    return base, tuned


def deltas(base: dict[str, Tensor], tuned: dict[str, dict[str, Tensor]], name: str) -> Tensor:
    """As the engine subtracts: in the dtype of the weights."""
    return torch.stack([expert[name] - base[name] for expert in tuned.values()])
