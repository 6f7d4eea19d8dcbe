"""What one read over a tensor's task vectors tells, entry by entry: energies, similarity, conflicting signs, distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.special import ndtr
from torch import Tensor

from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import row_blocks

REACH = 5.0
"""Histograms go from minus to plus so many standard deviations; what lies beyond is in the outermost bins."""
BINS = 51
"""Odd, so that zeros lie within a bin, not on an edge."""


@dataclass(frozen=True)
class Entries:
    """Of one tensor. Lists have an item for each expert, matrices a row and a column."""

    count: int
    inner: list[list[float]]
    """<D_s, D_t>; the energies |D_t|_F^2 on the diagonal."""
    signs_shared: list[list[int]]
    """Entries that both experts changed."""
    signs_opposed: list[list[int]]
    """Those that they changed in opposite directions."""
    mean: list[float]
    deviation: list[float]
    skewness: list[float]
    excess_kurtosis: list[float]
    """0 for a normal distribution, large for one with few large entries."""
    histogram: list[list[int]]
    base_energy: float
    base_inner: list[float]
    """|W0|_F^2 and <W0, D_t>: whether an expert is a fine-tune of this base at all."""

    @property
    def energies(self) -> list[float]:
        """|D_t|_F^2."""
        return [row[t] for t, row in enumerate(self.inner)]

    @property
    def base_cosine(self) -> list[float | None]:
        """Of W_t with W0: near 1 for a fine-tune, near 0 for a model of another origin."""
        cosines: list[float | None] = []
        for energy, product in zip(self.energies, self.base_inner, strict=True):
            expert = self.base_energy + 2 * product + energy
            scale = math.sqrt(max(0.0, self.base_energy * expert))
            cosines.append((self.base_energy + product) / scale if scale else None)
        return cosines

    @property
    def normal_distance(self) -> list[float | None]:
        """The largest difference between the entries' distribution function and the normal one of the same width (0 to 1)."""
        return [distance_from_normal(counts) for counts in self.histogram]


def distance_from_normal(counts: Sequence[int]) -> float | None:
    """Kolmogorov's distance, taken at the bins' inner edges; None if nothing was counted."""
    total = sum(counts)
    if not total:
        return None
    edges = torch.linspace(-REACH, REACH, BINS + 1, dtype=torch.float64)[1:-1]
    found = torch.tensor(counts, dtype=torch.float64).cumsum(0)[:-1] / total
    return float((found - torch.from_numpy(ndtr(edges.numpy()))).abs().max())


def read_entries(task_vectors: Float[Tensor, "task *shape"], frame: Frame | None, base: Tensor) -> Entries:
    """Go over the entries once, a block of rows at a time. Low-rank experts are expanded block by block."""
    tasks = len(task_vectors)
    sums = _Sums(tasks)
    scale = [_root_mean_square(vector, frame) for vector in task_vectors]
    for block, base_block in zip(_blocks(task_vectors, frame), _base_blocks(task_vectors, frame, base), strict=True):
        sums.add(block, base_block, scale)
    return sums.entries()


class _Sums:
    """Running totals in float64."""

    def __init__(self, tasks: int) -> None:
        self.count = 0
        self.inner = torch.zeros(tasks, tasks, dtype=torch.float64)
        self.powers = torch.zeros(tasks, 4, dtype=torch.float64)
        self.shared = torch.zeros(tasks, tasks, dtype=torch.float64)
        self.agreement = torch.zeros(tasks, tasks, dtype=torch.float64)
        self.histogram = torch.zeros(tasks, BINS, dtype=torch.long)
        self.base_energy = 0.0
        self.base_inner = torch.zeros(tasks, dtype=torch.float64)

    def add(self, block: Float[Tensor, "task entries"], base: Float[Tensor, " entries"], scale: Sequence[float]) -> None:
        wide = block.double()
        self.count += block.shape[1]
        self.inner += wide @ wide.T
        self.base_energy += float(base.square().sum())
        self.base_inner += wide @ base
        powers = wide.clone()
        for power in range(4):
            self.powers[:, power] += powers.sum(1)
            powers *= wide
        signs = block.sign().float()
        self.agreement += (signs @ signs.T).double()
        changed = signs.abs()
        self.shared += (changed @ changed.T).double()
        for task, width in enumerate(scale):
            if width:
                inside = (block[task].float() / width).clamp(-REACH, REACH)
                self.histogram[task] += torch.histc(inside, BINS, -REACH, REACH).long()

    def entries(self) -> Entries:
        moments = (self.powers / max(1, self.count)).tolist()
        mean = [first for first, *_ in moments]
        variance = [max(0.0, second - first**2) for first, second, *_ in moments]
        return Entries(
            count=self.count,
            inner=self.inner.tolist(),
            signs_shared=self.shared.long().tolist(),
            signs_opposed=((self.shared - self.agreement) / 2).round().long().tolist(),
            mean=mean,
            deviation=[math.sqrt(v) for v in variance],
            skewness=[
                (c - 3 * a * b + 2 * a**3) / v**1.5 if v else 0.0 for (a, b, c, _), v in zip(moments, variance, strict=True)
            ],
            excess_kurtosis=[
                (d - 4 * a * c + 6 * a * a * b - 3 * a**4) / v**2 - 3 if v else 0.0
                for (a, b, c, d), v in zip(moments, variance, strict=True)
            ],
            histogram=self.histogram.tolist(),
            base_energy=self.base_energy,
            base_inner=self.base_inner.tolist(),
        )


def _root_mean_square(vector: Tensor, frame: Frame | None) -> float:
    count = frame.shape[0] * frame.shape[1] if frame else vector.numel()
    return float(vector.double().norm()) / math.sqrt(max(1, count))


def _blocks(task_vectors: Tensor, frame: Frame | None) -> Iterator[Float[Tensor, "task entries"]]:
    """The task vectors' entries, a block of rows at a time."""
    if frame is None:
        flat = task_vectors.reshape(len(task_vectors), -1)
        for block in row_blocks(flat.shape[1], len(task_vectors)):
            yield flat[:, block].cpu()
        return
    left = frame.left
    for rows in row_blocks(frame.shape[0], frame.shape[1] * len(task_vectors)):
        written = task_vectors[:, rows] if left is None else left[rows] @ task_vectors
        yield frame.to_right(written.flatten(0, 1)).reshape(len(task_vectors), -1).cpu()


def _base_blocks(task_vectors: Tensor, frame: Frame | None, base: Tensor) -> Iterator[Float[Tensor, " entries"]]:
    """The base's own entries, in blocks that match `_blocks`."""
    tasks = len(task_vectors)
    if frame is None:
        flat = base.reshape(-1)
        for block in row_blocks(flat.numel(), tasks):
            yield flat[block].double()
        return
    matrix = base.reshape(frame.shape)
    for rows in row_blocks(frame.shape[0], frame.shape[1] * tasks):
        yield matrix[rows].reshape(-1).double()
