"""FR-Merging: the backbone of FREE-Merging, a high-pass filter on each task vector before the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Alpha, Merged, Options, method
from acemerge.numerics.linalg import weighted_sum

_ROUNDING = 1e-12
"""Of a float64 transform, relative: what is below it is nothing."""


@dataclass(frozen=True)
class FrOptions(Options):
    """Defaults are the authors' for eight ViT-B/32 tasks."""

    cutoff: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="c: frequencies within c * side of the highest one are kept")
    ] = 0.7
    side: Annotated[
        Literal["min", "max"], Field(description="of the matrix: its shorter side (ViT, LLM) or its longer one (RoBERTa)")
    ] = "min"
    align: Annotated[bool, Field(description="bring every filtered task vector to the largest one's mean magnitude")] = True
    alpha: Alpha = 0.7


@dataclass(frozen=True)
class HighPass:
    """tau -> Re ifft2(1{distance to the highest frequency <= radius} fft2(tau)), by the transform of real numbers."""

    gains: Float[Tensor, "rows half"]
    """Of the half spectrum. Taking the real part averages a frequency's mask with its mirror's; they differ for odd sizes."""
    kept: float
    """Share of the frequencies."""

    def __call__(self, tau: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """Filter a matrix, in float64."""
        spectrum: Tensor = torch.fft.rfft2(tau.double())
        filtered: Tensor = torch.fft.irfft2(spectrum.mul_(self.gains), s=tau.shape)
        return filtered


def high_pass(rows: int, columns: int, radius: float, device: torch.device) -> HighPass:
    """The spectrum is not shifted: index 0 is the constant, and (rows // 2, columns // 2) the highest frequency."""
    y = torch.arange(rows, dtype=torch.float64, device=device) - rows // 2
    x = torch.arange(columns, dtype=torch.float64, device=device) - columns // 2
    inside = torch.hypot(y[:, None], x) <= radius * (1 + _ROUNDING)  # 0.7 * 90 is 62.999... in floating point
    mirrored = inside.flip(0, 1).roll((1, 1), (0, 1))  # index -k modulo the size
    half = columns // 2 + 1
    return HighPass((inside[:, :half].double() + mirrored[:, :half]) / 2, float(inside.double().mean()))


def alignment(task_vectors: Float[Tensor, "task out in"], filter_: HighPass) -> list[float]:
    """max_s mean|tau'_s| / mean|tau'_t|; 0 where the filter leaves nothing but rounding to enlarge."""
    means = []
    for tau in task_vectors:
        before, after = float(tau.abs().mean(dtype=torch.float64)), float(filter_(tau).abs().mean())
        means.append(after if after > _ROUNDING * before else 0.0)
    return [max(means) / mean if mean > 0 else 0.0 for mean in means]


def _flops(tasks: int, rows: int, columns: int) -> float:
    """Two real transforms per task and two for the sum, about 2.5 N log2 N each."""
    size = max(2, rows * columns)
    return 5.0 * (tasks + 1) * size * (size.bit_length() - 1)


@method(
    "fr",
    title="FR-Merging (FREE-Merging without its experts)",
    paper="Zheng and Wang, FREE-Merging: Fourier Transform for Efficient Model Merging, ICCV 2025",
    rest="keep",
    facts={"kept_frequencies": "share of frequencies that passed the filter"},
    flops=_flops,
    float64_elements=lambda tasks, rows, columns: 4.5 * rows * columns,  # noqa: ARG005
)
def fr(task_vectors: Float[Tensor, "task out in"], options: FrOptions) -> Merged:
    """Cut the low frequencies of each task vector's 2-D spectrum, then sum: M = sum_t a_t Re ifft2(mask o fft2(tau_t)).

    The static part of FREE-Merging: no router, no per-task experts. How much is cut depends on the matrix's shape, because the
    radius is in index units: at the default almost nothing of a square matrix and most of a 4:1 one.
    """
    rows, columns = task_vectors.shape[1:]
    side = min(rows, columns) if options.side == "min" else max(rows, columns)
    filter_ = high_pass(rows, columns, options.cutoff * side, task_vectors.device)
    weights = alignment(task_vectors, filter_) if options.align else [1.0] * len(task_vectors)
    filtered = filter_(weighted_sum(task_vectors, weights))  # the filter is linear: one for the whole sum
    return Merged(filtered, {"kept_frequencies": filter_.kept})
