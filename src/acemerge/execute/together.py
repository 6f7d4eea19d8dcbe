"""Small tensors at once on a GPU, where one alone leaves most of it idle.

Each is merged in a thread and a CUDA stream of its own, by the code that merges one at a time: that serves every method, and the
bytes are the same. On a CPU a tensor's own work is shared by threads instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from acemerge.planning.tensor import PlannedTensor

_DEVICES = ("cuda",)
_ENTRIES = 2**24
"""Of tensors that are merged at once: as many as a matrix has that keeps a GPU busy, 4096 x 4096. Not measured."""


def together(tensors: Iterable[PlannedTensor], device: torch.device) -> list[list[PlannedTensor]]:
    """Neighbours in groups to be merged at once: no larger together than a large one is alone, so that memory stays bounded."""
    groups: list[list[PlannedTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or device.type not in _DEVICES or tensor.header.elements > room:
            groups.append([])
            room = _ENTRIES
        groups[-1].append(tensor)
        room -= tensor.header.elements
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
