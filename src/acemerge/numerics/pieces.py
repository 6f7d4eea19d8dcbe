"""Elementwise merging a piece of a tensor at a time, from the stored values to the one that is written.

Task vectors take many times the memory of the files they come from, and bringing in that memory takes longer than the arithmetic.
A piece fits the processor's cache, and its memory is used again for the next. What comes out are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.threads import share

Result = TypeVar("Result")

_ENTRIES = 2**19  # of all task vectors of a piece: 2 MiB in float32; with fewer, Python takes longer than the arithmetic
_RUN = 1024  # pieces are whole numbers of these, but for a tensor's last
_BESIDES = 4  # the base's piece and a method's results, in pieces
_PART = 2**20  # entries of a tensor that a thread takes at a time


def entries_at_work(experts: int, elements: int, threads: int) -> int:
    """Of a tensor that is merged so, with what a method makes of a piece besides, in all threads at once."""
    at_once = min(threads, -(-elements // _PART))
    return at_once * (experts + _BESIDES) * min(elements, _piece(experts))


def _piece(experts: int) -> int:
    return max(1, _ENTRIES // experts // _RUN) * _RUN


@runtime_checkable
class Vector(Protocol):
    """A tensor's entries in one row, in memory or still in a file."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the entries."""

    def numel(self) -> int:
        """How many."""

    def __getitem__(self, where: slice, /) -> Tensor:
        """A piece of them."""


@dataclass(frozen=True)
class Stored:
    """One tensor as the files hold it: the base's values and each expert's (none: it has the base's)."""

    base: Vector
    experts: Sequence[Vector | None]

    @property
    def piece(self) -> int:
        """Entries of a piece."""
        return _piece(len(self.experts))

    @property
    def dtype(self) -> torch.dtype:
        """Of the task vectors: float32, or float64 if any input is."""
        wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in (self.base, *self.experts))
        return torch.float64 if wide else torch.float32

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces from one entry to another, one after the other, each in the memory of the one before."""
        models = len(self.experts) + 1
        memory = torch.empty(models * min(self.piece, end - start), dtype=self.dtype)
        for place in range(start, end, self.piece):
            where = slice(place, min(place + self.piece, end))
            rows = memory[: models * (where.stop - where.start)].view(models, -1)
            base, task_vectors = rows[0], rows[1:]
            base.copy_(self.base[where])
            for task_vector, expert in zip(task_vectors, self.experts, strict=True):
                task_vector.copy_(self.base[where] if expert is None else expert[where])
            yield Piece(where, base, task_vectors.sub_(base))

    def each(self, work: Callable[[Piece], Result]) -> list[Result]:
        """Do something with every piece, in as many threads as torch has; the results in the pieces' order."""
        size = self.base.numel()
        starts = range(0, size, _PART)

        def do_part(start: int) -> list[Result]:
            return [work(piece) for piece in self.pieces(start, min(start + _PART, size))]

        # glibc hands freed memory back to the system, which must bring it in anew, until it has seen a larger piece freed.
        torch.empty(2**24, dtype=torch.uint8)
        return [result for part in share(do_part, starts) for result in part]

    def has_finite_task_vectors(self) -> bool:
        """Whether no task vector has NaN or infinite values."""
        return all(self.each(lambda piece: all(math.isfinite(value) for value in piece.task_vectors.aminmax())))


@dataclass(frozen=True)
class Piece:
    """Where it is in the tensor, W0 and W_t - W0 there."""

    where: slice
    base: Float[Tensor, " piece"]
    task_vectors: Float[Tensor, "task piece"]


@dataclass(frozen=True)
class MergedPieces:
    """What was found on the way: squared norms of the task vectors and of the merged one, and whether all values are finite."""

    energies: list[float]
    merged_energy: float
    finite: bool


def merge_pieces(stored: Stored, merge: Callable[[Tensor], Tensor], value: Float[Tensor, " n"]) -> MergedPieces:
    """Write W0 + merge(task vectors) into `value`, rounded to its dtype; `merge` gives memory that may be written to."""

    def merge_piece(piece: Piece) -> tuple[list[float], float, bool]:
        energies = squared_norms(piece.task_vectors)
        delta = merge(piece.task_vectors)
        (merged_energy,) = squared_norms(delta[None])
        written = value[piece.where].copy_(delta.add_(piece.base))
        return energies, merged_energy, math.isfinite(written.sum()) or bool(written.isfinite().all())

    found = stored.each(merge_piece)
    # Sums of squares are added exactly, so that it does not matter how the tensor was cut.
    energies = [math.fsum(piece[0][task] for piece in found) for task in range(len(stored.experts))]
    return MergedPieces(energies, math.fsum(piece[1] for piece in found), all(piece[2] for piece in found))


def squared_norms(rows: Float[Tensor, "task piece"]) -> list[float]:
    """|x_t|^2: to 3e-7 by short runs in float32 whose squares are added in float64; in float64 where float32 may not do."""
    if rows.dtype != torch.float32 or rows.shape[1] % _RUN:
        return [_squared_norm(row) for row in rows]
    runs = torch.linalg.vector_norm(rows.view(len(rows), -1, _RUN), dim=2).double()
    energies: list[float] = runs.square().sum(1).tolist()
    # Beyond these bounds squares leave float32's range, up or down.
    return [energy if 1e-20 < energy < 1e35 else _squared_norm(row) for energy, row in zip(energies, rows, strict=True)]


def _squared_norm(x: Float[Tensor, " piece"]) -> float:
    wide = x.double()
    return float(torch.dot(wide, wide))
