"""One expert's inputs: rows that its model takes, in batches, without their labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from acemerge.calibration.batches import batches_of_like_length

Batch = dict[str, Tensor]
_HASHED_AT_ONCE = 64


class Prepared(Protocol):
    """Rows made ready: what the bench prepares, and what is read from files."""

    @property
    def lengths(self) -> Tensor:
        """[row]: rows of like length are run together."""

    def batch(self, indices: Tensor) -> Batch:
        """What the model takes for these rows."""


@dataclass(frozen=True)
class Inputs:
    """The rows that a method may see of one expert's task."""

    prepared: Prepared

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.prepared.lengths)

    def batches(self) -> Iterator[Batch]:
        """Every row once, short ones first."""
        for indices in batches_of_like_length(self.prepared.lengths):
            yield self.prepared.batch(indices)

    def batches_in_order(self, size: int) -> Iterator[Batch]:
        """Every row once, as they come, so many at a time."""
        for indices in torch.split(torch.arange(self.rows), size):
            yield self.prepared.batch(indices)

    def some(self, size: int, generator: torch.Generator) -> Batch:
        """So many different rows, at random; all, if there are fewer."""
        return self.prepared.batch(torch.randperm(self.rows, generator=generator)[:size])

    @cached_property
    def sha256(self) -> str:
        """Of what the model is given: the same texts with another tokenizer are other inputs."""
        digest = hashlib.sha256(str(self.rows).encode())
        for batch in self.batches_in_order(_HASHED_AT_ONCE):
            for name, tensor in sorted(batch.items()):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
