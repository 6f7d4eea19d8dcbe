"""How a matrix is held as floats of 8 bits and scales, and how one is written so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.quantised.scaled import Block, scale_layout, spread
from acemerge.checkpoints.quantised.weights import rows_at_once
from acemerge.checkpoints.tensor_header import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EightBits:
    """Of one matrix, or a stack of them."""

    suffix: str
    """What follows its name in that of its scales."""
    scales: tuple[int, ...]
    """Their shape."""
    block: Block | None = None
    scale_dtype: str = "float32"
    """To which scales are rounded; they are written as float32."""
    dtype: str = "float8_e4m3fn"

    def headers(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, TensorHeader]]:
        """Of what a file holds for it."""
        return [(name, TensorHeader(self.dtype, shape)), (name + self.suffix, TensorHeader("float32", self.scales))]

    def quantised(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and scales: the largest number of every block is the largest that 8 bits can hold."""
        import torch

        layout = scale_layout(tuple(value.shape), self.scales, self.block)
        assert layout is not None  # by its plan
        *stacked, rows, columns = value.shape
        tall, wide = layout.tall, layout.wide
        kind = getattr(torch, self.dtype)
        matrices = value.reshape(-1, rows, columns)
        largest = torch.stack([_largest(matrix, tall, wide) for matrix in matrices]).reshape(*stacked, -1, -(-columns // wide))
        largest = largest.amax() if prod(self.scales) == 1 else largest
        scales = torch.where(largest > 0, largest / torch.finfo(kind).max, 1.0)
        scales = scales.to(getattr(torch, self.scale_dtype)).float().reshape(self.scales)
        grid = scales.reshape(layout.grid).expand(*stacked, *layout.grid[-2:]).reshape(len(matrices), *layout.grid[-2:])
        numbers = torch.empty(matrices.shape, dtype=kind)
        for matrix, own, out in zip(matrices, grid, numbers, strict=True):
            _divide(matrix, own, out, tall, wide)
        return numbers.reshape(value.shape), scales


@dataclass(frozen=True)
class StoredInEightBits:
    """What a model says of its matrices that are stored so."""

    settings: Mapping[str, Any]
    """Of config.json."""
    weights: Mapping[str, EightBits]


def _largest(matrix: Tensor, tall: int, wide: int) -> Tensor:
    """The largest absolute value of each block."""
    import torch

    rows, columns = matrix.shape
    step = max(tall, rows_at_once(columns) // tall * tall)
    found = []
    for start in range(0, rows, step):
        some = matrix[start : start + step]
        margins = (0, -columns % wide, 0, -len(some) % tall)
        padded = torch.nn.functional.pad(some, margins) if any(margins) else some
        blocks = padded.reshape(-1, tall, padded.shape[1] // wide, wide)
        found.append(torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3))).float())
    return torch.cat(found)


def _divide(matrix: Tensor, scales: Tensor, out: Tensor, tall: int, wide: int) -> None:
    """Every number by the scale of its block, some rows at a time."""
    import torch

    rows, columns = matrix.shape
    most = torch.finfo(out.dtype).max
    step = min(rows, rows_at_once(columns))
    floats = torch.empty(step, columns)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        of_rows = scales[torch.arange(rows)[some] // tall]
        out[some] = floats[: len(of_rows)].copy_(matrix[some]).div_(spread(of_rows, wide, columns)).clamp_(-most, most)
