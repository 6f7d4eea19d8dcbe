"""What comes out of a merge of one tensor: the value or the factors to write, and what a report says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from acemerge.methods.option_text import Fact
from acemerge.numerics.frame import Factors
from acemerge.planning.tensor import PlannedTensor

TensorFact = Fact | list[float]
"""What a report says of a tensor: what its method tells, and norms; `task_norms` in the order of its experts."""


@dataclass(frozen=True)
class MergedTensor:
    """The value to write, on the CPU, in the output dtype and the stored layout; facts and warnings for the report."""

    value: Tensor
    facts: Mapping[str, TensorFact]
    warnings: tuple[str, ...] = ()
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Of methods with one model per task: each expert's own parts, and what all of them refer to, as they are stored."""
    scales: Tensor | None = None
    """Of a value in 8 bits."""


@dataclass(frozen=True)
class MergedFactors:
    """A merged change as the product of two small matrices, in the stored order; facts and warnings for the report."""

    factors: Factors
    facts: Mapping[str, TensorFact]
    warnings: tuple[str, ...] = ()


def norms(energies: Sequence[float], merged_energy: float) -> dict[str, TensorFact]:
    """How long the merged change is, and against the longest task vector."""
    norm, largest = math.sqrt(merged_energy), math.sqrt(max(energies))
    ratio: dict[str, TensorFact] = {"norm_ratio": norm / largest} if largest else {}  # scaled weights that nobody changed
    return {"norm": norm, "largest_task_norm": largest, **ratio}


def tensor_warnings(planned: PlannedTensor, given: Sequence[str]) -> tuple[str, ...]:
    """With the tensor's name."""
    return tuple(f"tensor '{planned.name}': {warning}" for warning in given)
