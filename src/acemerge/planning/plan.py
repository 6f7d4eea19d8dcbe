"""The plan: every decision about every tensor, made from headers alone, before a byte is computed.

`planner.py` makes the decisions; here is what they look like, all together, and what they cost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from acemerge.checkpoints.families import Family
from acemerge.checkpoints.folder import Checkpoint
from acemerge.methods import Method, Options, get_method
from acemerge.methods.registry import Uses
from acemerge.planning.data import PlannedData
from acemerge.planning.estimates import account_bytes, flops, input_bytes, measured_bytes, parts_bytes, peak_memory
from acemerge.planning.fates import Action
from acemerge.planning.shares import ACTIONS, weights_by_fate
from acemerge.planning.tensor import PlannedTensor, computed, is_computed
from acemerge.planning.vocabulary import Vocabulary
from acemerge.recipe.recipe import Recipe
from acemerge.recipe.values import varies
from acemerge.version import __version__

ADAPTER_WEIGHTS = "adapter_model.safetensors"


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
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """What the output's config says because of how its weights are stored."""
    data: PlannedData | None = None
    """For methods that use it."""
    vocabulary: Vocabulary | None = None
    """None: all models have the same tokens in the same rows, as far as is known."""
    strangers: tuple[str, ...] = ()
    """What the weights say, not the headers, and so is noted later: of experts that are no fine-tunes of the base."""
    doubts: tuple[str, ...] = ()
    """The same of those that may be none, and of copies."""
    cautions: tuple[str, ...] = ()
    """What the finished merge itself says, and so is noted last."""

    def __str__(self) -> str:
        fates = ", ".join(f"{self.count(action)} {action}" for action in ACTIONS)
        return f"{len(self.experts)} experts by {self.method.name}; {fates}"

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
    def kinship(self) -> tuple[str, ...]:
        """All that the weights say of the experts."""
        return (*self.strangers, *self.doubts)

    @property
    def asked_options(self) -> dict[str, Any]:
        """Every option with its value; of those that vary, how they do."""
        return {**asdict(self.options), **{name: value for name, value in self.recipe.options.items() if varies(value)}}

    @property
    def varying_options(self) -> tuple[str, ...]:
        """Those of the method, or of a rule or slice, that are not the same everywhere."""
        asked = [self.recipe.options, *(rule.options for rule in self.recipe.tensors)]
        varying = [name for options in asked for name, value in options.items() if varies(value)]
        return tuple(dict.fromkeys([*varying, *(name for own in self.recipe.slices for name in own.options)]))

    @property
    def is_extraction(self) -> bool:
        """Whether one full fine-tune is written as an adapter, with nothing merged into it."""
        alone = len(self.experts) == 1 and self.experts[0].changes is None
        return alone and self.recipe.save_as == "adapter" and self.method.name == "average"

    @property
    def per_task_methods(self) -> list[str]:
        """The methods at work here that make one model per task, not one merged model."""
        return per_task_methods(self.tensors)

    @property
    def output_bytes(self) -> int:
        """Size of the merged weights, the heads and what per-task methods add, the last at most."""
        heads = sum(self.experts[h.expert].tensors[name].nbytes for h in self.heads for name in h.tensors)
        return sum(tensor.output_bytes + parts_bytes(tensor) for tensor in self.tensors) + heads

    @property
    def temporary_bytes(self) -> int:
        """Disk that is needed beside the output for a while: one shard's parts are written twice."""
        return max(sum(map(parts_bytes, shard)) for shard in self.shards.values())

    @property
    def input_bytes(self) -> int:
        """What will be read."""
        return sum(map(input_bytes, self.tensors))

    @property
    def uses(self) -> Uses:
        """What the methods at work here need: data is opened for those only that use it."""
        return "data" if self.data else "weights"

    @property
    def peak_memory(self) -> int:
        """Estimated peak of this process's own memory, beyond Python and torch themselves; what models compute not included."""
        return self.accounts + max(self._measuring_memory, *map(peak_memory, self.tensors))

    @property
    def accounts(self) -> int:
        """Of that, what does not depend on the tensors' sizes."""
        return account_bytes(len(self.tensors), [model.tensors for model in (self.base, *self.experts)])

    @property
    def _measuring_memory(self) -> int:
        """While an expert's model runs on data: its weights in float32, and what is measured."""
        if not self.data:
            return 0
        largest = max(sum(header.elements for header in expert.tensors.values()) for expert in self.experts)
        return 4 * largest + sum(map(measured_bytes, self.tensors))

    @property
    def flops(self) -> float:
        """Estimated operations, of the dearer branch where a method has two."""
        return sum(map(flops, self.tensors))

    def count(self, action: Action) -> int:
        """How many tensors have this fate."""
        return sum(tensor.action == action for tensor in self.tensors)

    @cached_property
    def weights(self) -> dict[str, int]:
        """How many numbers have which fate."""
        return weights_by_fate((tensor.action, tensor.output_header.elements) for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The whole plan for machines."""
        return {
            "base": self.base.name,
            "experts": [expert.name for expert in self.experts],
            "family": self.family.name,
            "method": self.method.name,
            "options": self.asked_options,
            "orientation": self.recipe.orientation,
            "saved_as": self.recipe.save_as,
            "per_task": bool(self.per_task_methods),
            "uses": self.uses,
            **({"data": self.data.record} if self.data else {}),
            **({"vocabulary": self.vocabulary.record} if self.vocabulary else {}),
            "totals": {
                **{action: self.count(action) for action in ACTIONS},
                **{f"{action}_weights": count for action, count in self.weights.items()},
                "omitted_tied": len(self.omitted),
                "input_bytes": self.input_bytes,
                "output_bytes": self.output_bytes,
                "peak_memory_bytes": self.peak_memory,
                "flops": self.flops,
            },
            "tensors": [tensor_record(tensor, shard, self.experts) for shard, group in self.shards.items() for tensor in group],
            "omitted": dict(self.omitted),
            "heads": {self.experts[head.expert].name: list(head.tensors) for head in self.heads},
            "notes": [*self.notes, *self.kinship],
        }

    @cached_property
    def digest(self) -> str:
        """Changes when the recipe, the code or any input file (header, size, date) does; what a resumed run must agree with."""
        models = (self.base, *self.experts)
        files = [[model.name, stamp.path.name, stamp.size, stamp.modified_ns] for model in models for stamp in model.stamps]
        headers = [[name, header.dtype, *header.shape] for model in models for name, header in model.tensors.items()]
        decisions = {**self.to_json(), "notes": list(self.notes)}
        content = json.dumps([__version__, decisions, files, headers], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()


def per_task_methods(tensors: Sequence[PlannedTensor]) -> list[str]:
    """The methods among these tensors' that make one model per task."""
    return sorted({tensor.fate.method for tensor in computed(tensors) if get_method(tensor.fate.method).per_task})


def tensor_record(tensor: PlannedTensor, shard: str, experts: Sequence[Checkpoint]) -> dict[str, Any]:
    """One tensor of the plan, as plain values."""
    record: dict[str, Any] = {
        "name": tensor.name,
        "shape": list(tensor.output_header.shape),
        "dtype": tensor.header.dtype,
        "output_dtype": tensor.written_dtype,
        "action": tensor.action,
        "reason": tensor.reason,
        "shard": shard,
    }
    if tensor.eight_bits:
        record["scales"] = tensor.name + tensor.eight_bits.suffix
    if told := rows_told(tensor, experts):
        record["rows"] = told
    if is_computed(tensor):
        fate = tensor.fate
        record["method"] = fate.method
        record["options"] = asdict(fate.options)
        record["orientation"] = fate.view.orientation
        record["experts"] = {experts[source.expert].name: source.name for source in fate.experts}
        if any(expert.changes is not None for expert in experts):
            record["route"] = f"core of rank {fate.core.rank}" if fate.core else "dense"
    return record


def rows_told(tensor: PlannedTensor, experts: Sequence[Checkpoint]) -> str:
    """What becomes of the rows of a tensor that has one for every token, in words; empty if they stay where they are."""
    lined_up = [experts[source.expert].name for source in tensor.experts if source.rows]
    told = [f"rows of {_listed(lined_up)} lined up by token"] if lined_up else []
    if tensor.rows:
        base, output = tensor.header.shape[tensor.rows.axis], len(tensor.rows.merged)
        told += [f"{base} rows become {output}"] if base != output else ["rows in another order or replaced"]
        told += [
            f"{len(taken.to)} taken from {'the base' if taken.expert is None else _listed([experts[taken.expert].name])}"
            for taken in tensor.rows.taken
        ]
        told += [f"{count} zero"] if (count := len(tensor.rows.zero)) else []
        told += [f"{count} the mean of all"] if (count := len(tensor.rows.unfounded)) else []
    return ", ".join(told)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
