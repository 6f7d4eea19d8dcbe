"""The plan: every decision about every tensor, made from headers alone, before a byte is computed.

Each of the base's tensors ends as one of four: merged (by the method), averaged, kept (the base's value) or copied (not a
weight). `planner.py` makes the decisions; here is what they look like.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from acemerge import __version__
from acemerge.checkpoints.families import Family
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tensor_header import TensorHeader, element_size
from acemerge.methods import Method, Options, get_method
from acemerge.methods.registry import Uses
from acemerge.numerics.frame import Sides
from acemerge.recipe.recipe import Recipe

if TYPE_CHECKING:
    from acemerge.calibration.source import Data

ADAPTER_WEIGHTS = "adapter_model.safetensors"
Form = Literal["value", "factors", "absent"]
Action = Literal["merged", "averaged", "kept", "copied"]


@dataclass(frozen=True)
class ExpertTensor:
    """Where one expert keeps its version of a tensor; without a name, the expert is an adapter that leaves it as it is."""

    expert: int
    name: str | None


@dataclass(frozen=True)
class PlannedTensor:
    """What will happen to one tensor of the base, and why."""

    name: str
    header: TensorHeader
    action: Action
    reason: str
    output_dtype: str
    method: str | None = None
    options: Options | None = None
    transposed: bool = False
    experts: tuple[ExpertTensor, ...] = ()
    core: Sides | None = None
    """Adapters are merged in their common low-rank core on these sides; None: as whole matrices."""
    rank: int = 0
    """The sum of the adapters' ranks, if there is a core."""
    in_pieces: bool = False
    """Its method is elementwise, and the experts store it whole: on a CPU it is merged a piece at a time."""
    form: Form = "value"
    """How the output holds it: as its value; as the factors of its change; or, left to the base, not at all."""
    factors_rank: int = 0
    """At most, if it is written as factors."""

    @property
    def output_bytes(self) -> int:
        """Its size in the output, at most."""
        size = element_size(self.output_dtype)
        if self.form == "factors":
            rows = self.header.shape[0]
            return (rows + self.header.elements // max(1, rows)) * self.factors_rank * size
        return self.header.elements * size if self.form == "value" else 0

    @property
    def parts_bytes(self) -> int:
        """What a method with one model per task writes for it to shared/ and tasks/, at most."""
        if self.method is None or not get_method(self.method).per_task:
            return 0
        size = 8 if self.output_dtype == "float64" else 4
        lost_by_rounding = 2 * self.header.elements if self.output_dtype in ("float16", "bfloat16") else 0
        return int(size * get_method(self.method).parts_elements(self.options, *self.matrix_shape)) + lost_by_rounding

    @property
    def input_bytes(self) -> int:
        """What is read for it, in the base's dtype; of adapters, their factors, in float32."""
        if self.core:
            _, rows, columns = self.matrix_shape
            return (rows + columns) * self.rank * 4 + (self.header.nbytes if self.form == "value" else 0)
        if self.form == "absent":
            return 0
        return self.header.nbytes * (1 + len(self.experts))

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(tasks, out, in) as the method sees it; a tensor that is not a matrix counts as one row, unless it has a core."""
        shape = self.header.shape
        rows = shape[0] if len(shape) == 2 or self.core else 1
        columns = self.header.elements // max(1, rows)
        return (len(self.experts), columns, rows) if self.transposed else (len(self.experts), rows, columns)

    @property
    def core_shape(self) -> tuple[int, int, int]:
        """(tasks, p, q) of what the method sees: the cores, where there are any."""
        tasks, rows, columns = self.matrix_shape
        rows = min(rows, self.rank + 1) if self.core in ("both", "out") else rows
        columns = min(columns, self.rank) if self.core in ("both", "in") else columns
        return tasks, rows, columns

    @property
    def flops(self) -> float:
        """Estimated operations."""
        if not self.method:
            return 0.0
        work = get_method(self.method).flops(*self.core_shape)
        if self.core:  # to the core by QR, and back
            _, rows, columns = self.matrix_shape
            work += 4.0 * (rows + columns) * self.rank**2 + 2.0 * rows * columns * self.rank
        return work

    @property
    def peak_memory(self) -> int:
        """Estimated bytes of this process's own memory while this tensor is merged; the inputs are memory-mapped."""
        if self.method is None:
            return self.output_bytes
        size = 8 if self.header.dtype == "float64" else 4
        if self.core:
            tasks, p, q = self.core_shape
            _, rows, columns = self.matrix_shape
            bases = 3.0 * (rows + columns) * (self.rank + 1)
            working = tasks * p * q + get_method(self.method).float64_elements(tasks, p, q)
            leaving = self.header.elements * size if self.form == "value" else 0
            return int(8 * (bases + working) + self.output_bytes + leaving)
        if self.in_pieces:
            return 2 * self.output_bytes  # one is merged while the one before is written
        working = get_method(self.method).float64_elements(*self.matrix_shape) * 8
        return int(
            len(self.experts) * self.header.elements * size + max(working, self.header.elements * size) + self.output_bytes
        )

    @property
    def measured_bytes(self) -> int:
        """Of one expert, while its model runs on data."""
        if not self.method or self.action != "merged":
            return 0
        return int(8 * get_method(self.method).measured_elements(*self.matrix_shape))


@dataclass(frozen=True)
class PlannedHead:
    """One expert's own tensors, written beside the output, and how the rest of that expert's names map to the base's."""

    expert: int
    tensors: tuple[str, ...]
    backbone: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """Everything the engine, the writer and the model card need to know."""

    recipe: Recipe
    method: Method
    options: Options
    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    family: Family
    tensors: tuple[PlannedTensor, ...]
    heads: tuple[PlannedHead, ...]
    omitted: Mapping[str, str]
    """Tied names left out of the output -> the name that holds their value."""
    notes: tuple[str, ...]
    data: Data | None = None
    """For methods that use it."""

    @cached_property
    def shards(self) -> dict[str, tuple[PlannedTensor, ...]]:
        """Output file name -> its tensors, filled in order up to the shard size; an adapter is one file."""
        if self.recipe.save_as == "adapter":
            return {ADAPTER_WEIGHTS: self.tensors}
        groups: list[list[PlannedTensor]] = [[]]
        filled = 0
        for tensor in self.tensors:
            if groups[-1] and filled + tensor.output_bytes > self.recipe.shard_size:
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += tensor.output_bytes
        if len(groups) == 1:
            return {"model.safetensors": tuple(groups[0])}
        total = len(groups)
        return {f"model-{i:05d}-of-{total:05d}.safetensors": tuple(group) for i, group in enumerate(groups, 1)}

    @property
    def per_task_methods(self) -> list[str]:
        """The methods at work here that make one model per task, not one merged model."""
        return per_task_methods(self.tensors)

    @property
    def output_bytes(self) -> int:
        """Size of the merged weights, the heads and what per-task methods add, the last at most."""
        heads = sum(self.experts[h.expert].tensors[name].nbytes for h in self.heads for name in h.tensors)
        return sum(tensor.output_bytes + tensor.parts_bytes for tensor in self.tensors) + heads

    @property
    def temporary_bytes(self) -> int:
        """Disk that is needed beside the output for a while: one shard's parts are written twice."""
        return max(sum(tensor.parts_bytes for tensor in shard) for shard in self.shards.values())

    @property
    def input_bytes(self) -> int:
        """What will be read."""
        return sum(tensor.input_bytes for tensor in self.tensors)

    @property
    def uses(self) -> Uses:
        """What the methods at work here need: data is opened for those only that use it."""
        return "data" if self.data else "weights"

    @property
    def peak_memory(self) -> int:
        """Estimated peak of this process's own memory, beyond Python and torch themselves; what models compute not included."""
        return max(self._measuring_memory, *(tensor.peak_memory for tensor in self.tensors))

    @property
    def _measuring_memory(self) -> int:
        """While an expert's model runs on data: its weights in float32, and what is measured."""
        if not self.data:
            return 0
        largest = max(sum(header.elements for header in expert.tensors.values()) for expert in self.experts)
        return 4 * largest + sum(tensor.measured_bytes for tensor in self.tensors)

    @property
    def flops(self) -> float:
        """Estimated operations, of the dearer branch where a method has two."""
        return sum(tensor.flops for tensor in self.tensors)

    def count(self, action: Action) -> int:
        """How many tensors have this fate."""
        return sum(tensor.action == action for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The whole plan for machines."""
        return {
            "base": self.base.name,
            "experts": [expert.name for expert in self.experts],
            "family": self.family.name,
            "method": self.method.name,
            "options": asdict(self.options),
            "orientation": self.recipe.orientation,
            "saved_as": self.recipe.save_as,
            "per_task": bool(self.per_task_methods),
            "uses": self.uses,
            **({"data": self.data.record} if self.data else {}),
            "totals": {
                **{action: self.count(action) for action in ("merged", "averaged", "kept", "copied")},
                "omitted_tied": len(self.omitted),
                "input_bytes": self.input_bytes,
                "output_bytes": self.output_bytes,
                "peak_memory_bytes": self.peak_memory,
                "flops": self.flops,
            },
            "tensors": [tensor_record(tensor, shard, self.experts) for shard, group in self.shards.items() for tensor in group],
            "omitted": dict(self.omitted),
            "heads": {self.experts[head.expert].name: list(head.tensors) for head in self.heads},
            "notes": list(self.notes),
        }

    @cached_property
    def digest(self) -> str:
        """Changes when the recipe, the code or any input file (header, size, date) does; what a resumed run must agree with."""
        models = (self.base, *self.experts)
        files = [[model.name, stamp.path.name, stamp.size, stamp.modified_ns] for model in models for stamp in model.stamps]
        headers = [[name, header.dtype, *header.shape] for model in models for name, header in model.tensors.items()]
        content = json.dumps([__version__, self.to_json(), files, headers], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()


def per_task_methods(tensors: Sequence[PlannedTensor]) -> list[str]:
    """The methods among these tensors' that make one model per task."""
    return sorted({tensor.method for tensor in tensors if tensor.method and get_method(tensor.method).per_task})


def tensor_record(tensor: PlannedTensor, shard: str, experts: Sequence[Checkpoint]) -> dict[str, Any]:
    """One tensor of the plan, as plain values."""
    record: dict[str, Any] = {
        "name": tensor.name,
        "shape": list(tensor.header.shape),
        "dtype": tensor.header.dtype,
        "output_dtype": tensor.output_dtype,
        "action": tensor.action,
        "reason": tensor.reason,
        "shard": shard,
    }
    if tensor.method and tensor.options:
        record["method"] = tensor.method
        record["options"] = asdict(tensor.options)
        record["orientation"] = "stored [in, out], merged as [out, in]" if tensor.transposed else "as stored"
        record["experts"] = {experts[source.expert].name: source.name for source in tensor.experts}
        if any(expert.changes is not None for expert in experts):
            record["route"] = f"core of rank {tensor.rank}" if tensor.core else "dense"
    return record
