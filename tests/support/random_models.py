"""Random small models, and how they are merged: examples for properties."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import acemerge
from acemerge.methods import all_methods
from small_models import Models, write_model

METHODS = sorted(method.name for method in all_methods() if method.uses == "weights" and method.experts is None)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A base of these shapes, experts of it, and a method."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    experts: int
    method: str
    seed: int

    def write(self, folder: Path) -> Models:
        generator = torch.Generator().manual_seed(self.seed)

        def tensors(scale: float) -> list[torch.Tensor]:
            return [scale * torch.randn(shape, generator=generator) for shape in self.shapes]

        def named(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return {f"layers.{i}.weight": value.to(self.dtype) for i, value in enumerate(values)}

        base = tensors(1.0)
        moved = [[a + b for a, b in zip(base, tensors(0.05), strict=True)] for _ in range(self.experts)]
        folders = [write_model(folder / f"expert-{i}", named(values)) for i, values in enumerate(moved)]
        return Models(write_model(folder / "base", named(base)), folders)

    def merge(self, models: Models, output: Path, **keywords: Any) -> Path:
        keywords = {"shard_size": "1kB", "threads": 1, **keywords}
        acemerge.merge(models.base, models.experts, output, self.method, quiet=True, **keywords)
        return output


_side = st.integers(1, 24)
_shape = st.one_of(st.tuples(_side, _side), st.tuples(_side), st.just(()), st.tuples(st.integers(1, 3), _side, _side))
cases = st.builds(
    Case,
    st.lists(_shape, max_size=5).map(lambda shapes: ((12, 8), *shapes)),  # some methods want a matrix
    st.sampled_from(DTYPES),
    st.integers(2, 4),
    st.sampled_from(METHODS),
    st.integers(0, 1000),
)
