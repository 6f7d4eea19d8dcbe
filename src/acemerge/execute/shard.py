"""One shard of one or many plans: every tensor is read once and merged at all settings, into every setting's own file.

The next tensor's pages are brought in while one is merged, and the one before is hashed and written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from acemerge.execute.passes import Gathered
from acemerge.execute.together import own_stream, together
from acemerge.numerics.threads import share
from acemerge.output.adapter_writer import AdapterWriter
from acemerge.output.writer import PartsWriter, StreamedFile, tensor_hash
from acemerge.planning.plan import Plan, tensor_record
from acemerge.planning.progress import Progress
from acemerge.planning.tensor import PlannedTensor, is_computed
from acemerge.tensors.computing import TensorMerge
from acemerge.tensors.factoring import merge_to_factors_at_points
from acemerge.tensors.merging import merge_tensor_at_points
from acemerge.tensors.results import MergedFactors, MergedTensor, TensorFact
from acemerge.tensors.task_vectors import prefetch

_DIGITS = 12
"""Of numbers that are told of a tensor."""
Record = dict[str, Any]
"""What is noted of a finished shard: its hash, its parts' and what became of each of its tensors."""
Result = MergedTensor | MergedFactors | None
"""A tensor's merged value; or the factors of its change, none if nobody changed it."""
AtSettings = Iterable[tuple[list[int], Result]]
"""Each distinct result with the settings that it belongs to, by index."""


@dataclass(frozen=True)
class ShardWriter:
    """Carries out a shard of plans that differ in their method's options alone, each into a folder of its own.

    Every engine does so, in whichever process and thread it likes.
    """

    plans: Sequence[Plan]
    folders: Sequence[Path]
    gathered: Sequence[Gathered]
    """Of each plan, what its methods' passes found."""
    device: torch.device
    progress: Progress

    def run_shard(self, shard: str) -> list[Record]:
        """Merge one shard's tensors straight into every plan's file."""
        rows = list(zip(*(_in_file_order(plan, shard) for plan in self.plans), strict=True))
        with ExitStack() as open_files:
            outputs = [
                _open_output(plan, shard, folder, open_files) for plan, folder in zip(self.plans, self.folders, strict=True)
            ]
            behind = open_files.enter_context(_WriteBehind())
            for row, results in self._merged(rows):
                for sharing, merged in results:
                    behind.do(partial(_add, outputs, row, sharing, merged))
                self.progress.advance(row[0])
            behind.wait()
            return [output.finish() for output in outputs]

    def _merged(self, rows: Sequence[Sequence[PlannedTensor]]) -> Iterator[tuple[Sequence[PlannedTensor], AtSettings]]:
        """Each tensor, as every plan has it, with its merges; the following ones' pages are brought in meanwhile."""
        groups = together(rows, self.device)
        with ThreadPoolExecutor(1) as reader:
            for group, following in zip(groups, [*groups[1:], []], strict=True):
                ahead = [reader.submit(prefetch, self.plans[0], row[0]) for row in following if _reads_files(row[0])]
                # One alone may share its own work; and a GPU keeps memory for every stream, so a large one gets none of its own.
                merged = share(self._merge_beside_others, group) if len(group) > 1 else map(self._merge, group)
                yield from zip(group, merged, strict=True)
                for future in ahead:
                    future.result()

    def _merge_beside_others(self, row: Sequence[PlannedTensor]) -> AtSettings:
        with own_stream(self.device):
            return list(self._merge(row))

    def _merge(self, row: Sequence[PlannedTensor]) -> AtSettings:
        merges = [
            TensorMerge(plan, tensor, found.get(tensor.setting))
            for plan, tensor, found in zip(self.plans, row, self.gathered, strict=True)
        ]
        if row[0].form in ("factors", "left out"):
            return merge_to_factors_at_points(merges, self.device)
        if row[0].form == "value":
            return merge_tensor_at_points(merges, self.device)
        return [(list(range(len(row))), MergedTensor(torch.empty(0), {}))]  # left to the base


def _reads_files(tensor: PlannedTensor) -> bool:
    """Whether it is read whole; of adapters, only their factors are, which are small."""
    return tensor.form != "absent" and not (is_computed(tensor) and tensor.fate.core and tensor.form != "value")


class _WriteBehind:
    """One thing is written while the next is made: memory holds two."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def do(self, write: Callable[[], None]) -> None:
        """In the thread, when what it was given before is done."""
        self.wait()
        self._writing = self._pool.submit(write)

    def wait(self) -> None:
        """Until all is written; raises what went wrong."""
        if self._writing:
            self._writing.result()


def _add(outputs: Sequence[_Output], row: Sequence[PlannedTensor], sharing: Sequence[int], merged: Result) -> None:
    """A result to every output that it belongs to; it is hashed once."""
    facts = _facts(merged)
    for index in sharing:
        outputs[index].add(row[index], merged, facts)


def _repeatable(fact: TensorFact) -> TensorFact:
    """Without the last digits: a BLAS library may find others for the same numbers at another place in memory."""
    if isinstance(fact, float):
        return float(f"{fact:.{_DIGITS}g}")
    return [float(f"{number:.{_DIGITS}g}") for number in fact] if isinstance(fact, list) else fact


def _facts(merged: Result) -> dict[str, Any]:
    """What a record says of a result, whichever settings it belongs to."""
    if merged is None:
        return {"active_experts": 0, "warnings": []}
    told = {"hash": tensor_hash(merged.value)} if isinstance(merged, MergedTensor) else {}
    facts = {name: _repeatable(fact) for name, fact in merged.facts.items()}
    return {**facts, "warnings": list(merged.warnings), **told}


def _in_file_order(plan: Plan, shard: str) -> Sequence[PlannedTensor]:
    """Wide dtypes first, which keeps every tensor aligned in the file; an adapter's file sees to that itself.

    What is written in 8 bits comes before them: its scales are as wide as those of float32.
    """
    if plan.recipe.save_as == "adapter":
        return plan.shards[shard]
    return sorted(plan.shards[shard], key=_place_in_file)


def _place_in_file(tensor: PlannedTensor) -> tuple[bool, int]:
    return tensor.eight_bits is None, -tensor.output_bytes // max(1, tensor.output_header.elements)


@dataclass
class _ModelOutput:
    """A file of weights, and what per-task methods write beside it."""

    plan: Plan
    shard: str
    folder: Path
    open_files: ExitStack
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        headers = [written for tensor in _in_file_order(self.plan, self.shard) for written in tensor.written]
        self._file = StreamedFile(self.folder / self.shard, headers, self.open_files)
        self._parts = PartsWriter(self.folder, self.shard, self.open_files)

    def add(self, tensor: PlannedTensor, merged: Result, facts: Mapping[str, Any]) -> None:
        assert isinstance(merged, MergedTensor)
        self.records.append({**tensor_record(tensor, self.shard, self.plan.experts), **facts})
        self._parts.add(tensor.name, merged.shared, merged.parts)
        self._file.add(merged.value)
        if merged.scales is not None:
            self._file.add(merged.scales)

    def finish(self) -> Record:
        return {"hash": self._file.finish(), "parts": self._parts.finish(), "tensors": self.records}


@dataclass
class _AdapterOutput:
    """One adapter; a tensor that stays with the base is only accounted for."""

    plan: Plan
    shard: str
    folder: Path
    open_files: ExitStack
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._writer = AdapterWriter(self.plan, self.folder, self.open_files)

    def add(self, tensor: PlannedTensor, merged: Result, facts: Mapping[str, Any]) -> None:
        if isinstance(merged, MergedFactors):
            self._writer.add_factors(tensor, merged)
        elif merged is not None and tensor.form == "value":
            self._writer.add_value(tensor, merged.value)
        told = {name: fact for name, fact in facts.items() if name != "hash"}  # the file holds no such tensor
        self.records.append({**tensor_record(tensor, self.shard, self.plan.experts), **told, "written": tensor.form})

    def finish(self) -> Record:
        return {"hash": self._writer.finish(), "parts": {}, "tensors": self.records}


_Output = _ModelOutput | _AdapterOutput


def _open_output(plan: Plan, shard: str, folder: Path, open_files: ExitStack) -> _Output:
    kind = _AdapterOutput if plan.recipe.save_as == "adapter" else _ModelOutput
    return kind(plan, shard, folder, open_files)
