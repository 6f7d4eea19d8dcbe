"""One tensor of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeGuard, TypeVar

from acemerge.checkpoints.quantised.eight_bits import EightBits
from acemerge.checkpoints.tensor_header import TensorHeader, element_size
from acemerge.planning.fates import Action, Computed, ExpertTensor, Fate, Setting, experts_of
from acemerge.planning.rows import OutputRows

Form = Literal["value", "factors", "left out", "absent"]
AnyFate = TypeVar("AnyFate", bound=Fate, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Planned(Generic[AnyFate]):
    """What will happen to one tensor of the base, and why."""

    name: str
    header: TensorHeader
    output_dtype: str
    fate: AnyFate
    form: Form = "value"
    """How the output holds it: as its value; as the factors of its change; or not at all: an adapter has no place for its change,
    which is only measured, or it is left to the base."""
    factors_rank: int = 0
    """At most, if it is written as factors."""
    rows: OutputRows | None = None
    """Of a tensor with a row for every token: the output's, if these are not the base's."""
    eight_bits: EightBits | None = None
    """How it is written in 8 bits, if it is; its output dtype is that in which it is merged."""
    made_bytes: int = 0
    """Of the floats that reading it makes in memory, in all models: each keeps its latest."""

    @property
    def action(self) -> Action:
        """Its fate in a word."""
        return self.fate.action

    @property
    def reason(self) -> str:
        """Why, in words; empty if there is nothing to explain."""
        return str(self.fate.reason)

    @property
    def method(self) -> str | None:
        """What makes it, unless it stays as it is."""
        return self.fate.method if isinstance(self.fate, Computed) else None

    @property
    def setting(self) -> Setting | None:
        """Its method and options, unless it stays as it is."""
        return self.fate.setting if isinstance(self.fate, Computed) else None

    @property
    def experts(self) -> tuple[ExpertTensor, ...]:
        """Those that take part."""
        return experts_of(self.fate)

    @property
    def output_header(self) -> TensorHeader:
        """Of what is written, if that is its value."""
        header = self.rows.header(self.header) if self.rows else self.header
        return replace(header, dtype=self.output_dtype)

    @property
    def written(self) -> list[tuple[str, TensorHeader]]:
        """What a file holds of its value: names and headers."""
        if self.eight_bits:
            return self.eight_bits.headers(self.name, self.header.shape)
        return [(self.name, self.output_header)]

    @property
    def written_dtype(self) -> str:
        """Of its numbers in the file."""
        return self.eight_bits.dtype if self.eight_bits else self.output_dtype

    @property
    def output_bytes(self) -> int:
        """Its size in the output, at most."""
        if self.form == "factors":
            rows = self.header.shape[0]
            return (rows + self.header.elements // max(1, rows)) * self.factors_rank * element_size(self.output_dtype)
        return sum(header.nbytes for _, header in self.written) if self.form == "value" else 0


PlannedTensor = Planned[Fate]
ComputedTensor = Planned[Computed]


def is_computed(tensor: PlannedTensor) -> TypeGuard[ComputedTensor]:
    """Whether a method makes it."""
    return isinstance(tensor.fate, Computed)


def computed(tensors: Sequence[PlannedTensor]) -> list[ComputedTensor]:
    """Those of them that a method makes."""
    return [tensor for tensor in tensors if is_computed(tensor)]


def apart(tensor: ComputedTensor) -> list[ComputedTensor]:
    """A fused matrix as the matrices that are merged for themselves; any other tensor as it is."""
    return [
        replace(
            tensor,
            header=replace(tensor.header, shape=view.own_shape(tensor.header.shape)),
            fate=replace(tensor.fate, view=view),
        )
        for view in tensor.fate.view.apart()
    ]


def matrix_shape(tensor: ComputedTensor) -> tuple[int, int, int]:
    """(tasks, out, in) as the method sees it; a tensor that is not a matrix counts as one row, unless it has a core."""
    fate, shape = tensor.fate, tensor.header.shape
    rows = shape[0] if len(shape) == 2 or fate.core else 1
    columns = tensor.header.elements // max(1, rows)
    return (len(fate.experts), columns, rows) if fate.view.transposed else (len(fate.experts), rows, columns)


def core_shape(tensor: ComputedTensor) -> tuple[int, int, int]:
    """(tasks, p, q) of what the method sees: the cores, where there are any."""
    tasks, rows, columns = matrix_shape(tensor)
    core = tensor.fate.core
    if core is None:
        return tasks, rows, columns
    rows = min(rows, core.rank + 1) if core.sides in ("both", "out") else rows
    columns = min(columns, core.rank) if core.sides in ("both", "in") else columns
    return tasks, rows, columns
