"""Mixtures that transformers stacks as it loads them: parameters whose matrices a file holds one expert at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from acemerge.adapters.change import LoraChange
from acemerge.adapters.stacked import StackedChange
from acemerge.checkpoints.families import modern_name
from acemerge.checkpoints.tensor_header import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

_MATRIX = re.compile(r"(?P<owner>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
# The parameter -> the matrices that lie below each other in it, by either naming.
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


@dataclass(frozen=True)
class Stack:
    """Such a parameter: [expert, out, in]."""

    name: str
    """In the model."""
    matrices: tuple[tuple[str, ...], ...]
    """In the file, of each expert."""
    rows: tuple[int, ...]
    """How many outputs each of an expert's matrices has."""
    inputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the parameter."""
        return len(self.matrices), sum(self.rows), self.inputs


def stacks(tensors: Mapping[str, TensorHeader]) -> dict[str, Stack]:
    """Those of a file with these tensors, by name."""
    owners: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        if found := _MATRIX.fullmatch(name):
            owners[found["owner"]][int(found["expert"])].add(found["part"])
    every = [stack for owner, experts in owners.items() for stack in _of_owner(owner, experts, tensors)]
    return {stack.name: stack for stack in every}


def _of_owner(owner: str, experts: Mapping[int, set[str]], tensors: Mapping[str, TensorHeader]) -> Iterator[Stack]:
    if sorted(experts) != list(range(len(experts))):
        return
    common = set.intersection(*experts.values())
    for parameter, namings in _PARTS.items():
        for parts in (parts for parts in namings if common.issuperset(parts)):
            matrices = tuple(tuple(f"{owner}.{expert}.{part}.weight" for part in parts) for expert in range(len(experts)))
            shapes = {tuple(tensors[name].shape for name in names) for names in matrices}
            first = next(iter(shapes))
            if len(shapes) == 1 and all(len(shape) == 2 and shape[1] == first[0][1] for shape in first):
                yield Stack(f"{modern_name(owner)}.{parameter}", matrices, tuple(shape[0] for shape in first), first[0][1])


def taken_apart(stacked: StackedChange, stack: Stack) -> Iterator[tuple[str, LoraChange]]:
    """The change of each matrix: its own rows of the expert's factor on the left, and the whole of the one on the right."""
    ends = list(accumulate(stack.rows))
    for expert, names in enumerate(stack.matrices):
        for name, end, height in zip(names, ends, stack.rows, strict=True):
            read = partial(_factor, stacked, expert, slice(end - height, end))
            yield name, LoraChange(
                read, stacked.down, stacked.up, stacked.scale, stacked.rank, stored_in_out=False, shape=(height, stack.inputs),
                module=name.removesuffix(".weight"), is_embedding=False, of_parameter=True,
            )  # fmt: skip


def _factor(stacked: StackedChange, expert: int, rows: slice, name: str) -> Tensor:
    left, right = stacked.factors_of(expert)
    return left[rows] if name == stacked.up else right
