"""Small tensors at once on a GPU, where one alone leaves most of it idle.

Each is merged in a thread and a CUDA stream of its own, by the code that merges one at a time: that serves every method, and the
bytes are the same. On a CPU a tensor's own work is shared by threads instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from acemerge.planning.tensor import PlannedTensor

_DEVICES = ("cuda",)
_ENTRIES = 2**24
"""Of tensors that are merged at once: as many as a matrix has that keeps a GPU busy, 4096 x 4096. Not measured."""


def together(rows: Iterable[Sequence[PlannedTensor]], device: torch.device) -> list[list[Sequence[PlannedTensor]]]:
    """Neighbours in groups to be merged at once: no larger together than a large one is alone, so that memory stays bounded.

    A row is one tensor as every plan has it.
    """
    groups: list[list[Sequence[PlannedTensor]]] = []
    room = 0
    for row in rows:
        entries = len(row) * row[0].header.elements
        if not groups or device.type not in _DEVICES or entries > room:
            groups.append([])
            room = _ENTRIES
        groups[-1].append(row)
        room -= entries
    return groups


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What a thread asks of a GPU here does not wait for what other threads ask of it."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # there, statistics were gathered
    with torch.cuda.stream(stream):
        yield
