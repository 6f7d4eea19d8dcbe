"""Several devices at once: the bytes of one, and a failure of one ends the work on all."""

from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch

from acemerge import MergeError
from acemerge.execute import shard
from acemerge.execute.engines.local import LocalEngine
from acemerge.execute.opening import find_sources, make_plan
from acemerge.output import resources
from acemerge.output.resources import needed_space
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from interruption import one_by_one
from small_models import Models, merge_into_shards, tree


@pytest.mark.parametrize("method", ["ace", "emr", "dare_ties"])
def test_several_devices_give_the_bytes_of_one(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    merge_into_shards(models, tmp_path / "one", method)
    both, threads = Barrier(2), set()

    def together(*arguments: Any) -> MergedTensor:
        if get_ident() not in threads:
            threads.add(get_ident())
            both.wait(timeout=60)  # until the other device is at work too
        return merge_tensor(*arguments)

    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(together))
    merge_into_shards(models, tmp_path / "two", method, device="cpu,cpu", quiet=False)
    assert len(threads) == 2
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert "6/6 tensors" in capfd.readouterr().err


def test_a_failure_on_one_device_ends_the_work_on_all(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(plan: Plan, planned: PlannedTensor, *rest: Any) -> MergedTensor:
        if planned.name == "layers.1.weight":
            raise MergeError("this tensor is wrong")
        return merge_tensor(plan, planned, *rest)

    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(failing))
    with pytest.raises(MergeError, match="this tensor is wrong"):
        merge_into_shards(models, tmp_path / "out", device="cpu,cpu")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    merge_into_shards(models, tmp_path / "out", device="cpu,cpu")
    merge_into_shards(models, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_more_at_once_needs_more(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(
        {"base": str(models.base), "experts": [{"model": str(e)} for e in models.experts], "method": "emr", "shard_size": "1kB"}
    )
    plan = make_plan(recipe, find_sources(recipe))
    assert len(plan.shards) == 2
    assert needed_space(plan, 2) == needed_space(plan, 100) == needed_space(plan) + plan.temporary_bytes
    cpu = torch.device("cpu")
    assert LocalEngine((cpu, cpu)).at_once(plan) == 2
    assert LocalEngine((cpu, cpu)).problems([plan]) == []
    monkeypatch.setattr(resources, "available_memory", lambda: plan.peak_memory)
    assert LocalEngine((cpu,)).problems([plan]) == []
    assert "memory" in LocalEngine((cpu, cpu)).problems([plan])[0]
    assert LocalEngine((torch.device("cuda"),) * 2).problems([plan]) == []
