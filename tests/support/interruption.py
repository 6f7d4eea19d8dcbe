"""Interrupt a merge at one tensor, and see which tensors were merged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import acemerge
from acemerge.execute import local
from acemerge.planning.plan import Plan, PlannedTensor
from acemerge.tensors.task_vectors import MergedTensor, merge_tensor
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
        patched.setattr(local, "merge_tensor", stop_at("layers.1.weight", calls))
        with pytest.raises(KeyboardInterrupt):
            acemerge.merge(models.base, models.experts, output, shard_size="1kB", **options)  # type: ignore[arg-type]
    assert not output.exists()
    return calls


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(local, "merge_tensor", stop_at("", calls))
    return calls
