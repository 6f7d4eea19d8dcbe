"""What travels to other processes, and what they say when something is wrong with it."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle

from acemerge import InputError, MergeError
from acemerge.calibration.measured import Measured, keep
from acemerge.execute import ray_cluster as ray_engine
from acemerge.execute.engines.registry import Work
from acemerge.execute.opening import Scene, find_sources, make_plan
from acemerge.execute.passes import gather_statistics
from acemerge.execute.ray_task import Order, Part, write_shard
from acemerge.methods import Options, all_methods
from acemerge.planning.progress import SilentProgress
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.merging import merge_tensor
from small_models import Models


def an_order(models: Models) -> Order:
    recipe = make_recipe({"base": str(models.base), "experts": [{"model": str(e)} for e in models.experts], "method": "average"})
    scene = Scene(find_sources(recipe))
    digests = [plan.digest for plan in scene.plans([recipe])]
    return Order([recipe], scene, digests, Path.cwd(), gathered={0: {}})


def test_a_machine_that_sees_other_files_says_so(models: Models, tmp_path: Path) -> None:
    order, part = an_order(models), Part("model.safetensors", {0: tmp_path})
    *names, records = write_shard(pickle.dumps(order), part, "cpu", 1)
    assert isinstance(records, list)
    assert [tensor["name"] for tensor in records[0]["tensors"]] == names
    with pytest.raises(MergeError, match=r"^machine .* cannot take part: a model or its date, or the version"):
        next(write_shard(pickle.dumps(replace(order, digests=["other"])), part, "cpu", 1))
    other = pickle.dumps(replace(order, scene=replace(order.scene, relative_to=Path("not there"))))
    shutil.move(models.base, tmp_path / "moved")
    with pytest.raises(MergeError, match=r"cannot take part: .*base"):
        next(write_shard(other, part, "cpu", 1))


@pytest.mark.parametrize("name", [method.name for method in all_methods() if method.statistics])
def test_what_a_statistics_pass_gathers_means_the_same_in_another_process(name: str, models: Models) -> None:
    recipe = make_recipe({"base": str(models.base), "experts": [{"model": str(e)} for e in models.experts], "method": name})
    plan = make_plan(recipe, find_sources(recipe))
    gathered = gather_statistics(plan, torch.device("cpu"), SilentProgress())
    packed = cloudpickle.dumps(gathered)
    assert len(packed) < 10_000_000
    travelled = pickle.loads(packed)
    for tensor in plan.tensors:
        here = merge_tensor(plan, tensor, torch.device("cpu"), gathered.get(tensor.setting)).value
        assert torch.equal(here, merge_tensor(plan, tensor, torch.device("cpu"), travelled.get(tensor.setting)).value)


def test_what_was_measured_on_data_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path))
    gram = torch.eye(3, dtype=torch.float64)
    measured = Measured({"red": [keep("some key", lambda: {"layer": gram})]})
    packed = cloudpickle.dumps(measured)
    assert gram.numpy().tobytes() not in packed
    assert torch.equal(pickle.loads(packed).of("red", "layer"), gram)


def test_what_cannot_travel_is_refused(models: Models) -> None:
    order = an_order(models)
    gathered: Any = {0: {("somebodys_method", Options()): (letter for letter in "no")}}
    work = Work(order.scene.plans(order.recipes), [], gathered, {})
    with pytest.raises(InputError, match="what somebodys_method gathered cannot be sent to other processes"):
        ray_engine.RayEngine(order.scene)._packed_order(work)
