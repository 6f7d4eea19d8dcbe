"""Interrupt a merge at one tensor, and see which tensors were merged."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
from acemerge.execute import shard
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.computing import TensorMerge
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from small_models import Models


def stop_at(name: str, calls: list[str]) -> Callable[[Plan, PlannedTensor, torch.device, object], MergedTensor]:
    """A merge_tensor that counts its calls and is interrupted at one tensor."""

    def interrupted(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: object) -> MergedTensor:
        calls.append(planned.name)
        if planned.name == name:
            raise KeyboardInterrupt
        return merge_tensor(plan, planned, device, statistics)

    return interrupted


def interrupt(models: Models, output: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[str]:
    calls: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", calls)))
        with pytest.raises(KeyboardInterrupt):
            acemerge.merge(models.base, models.experts, output, shard_size="1kB", **options)  # type: ignore[arg-type]
    assert not output.exists()
    return calls


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("", calls)))
    return calls


MergeOne = Callable[..., Any]
"""Takes what merge_tensor takes; what a test puts in its place may never return."""


def one_by_one(merge: MergeOne) -> Callable[[Sequence[TensorMerge], torch.device], Iterator[tuple[list[int], MergedTensor]]]:
    """A stand-in for what a shard's writer calls for a tensor at all settings: this function for each of them."""

    def at_points(merges: Sequence[TensorMerge], device: torch.device) -> Iterator[tuple[list[int], MergedTensor]]:
        for point, each in enumerate(merges):
            yield [point], merge(each.plan, each.planned, device, each.statistics)

    return at_points
