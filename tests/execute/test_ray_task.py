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
from acemerge.execute import ray as ray_engine
from acemerge.execute.passes import gather_statistics
from acemerge.execute.pipeline import find_sources, make_plan
from acemerge.execute.ray_task import Order, write_shard
from acemerge.methods import all_methods
from acemerge.planning.progress import SilentProgress
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.task_vectors import merge_tensor
from small_models import Models


def packed_order(models: Models, **changes: Any) -> bytes:
    recipe = make_recipe({"base": str(models.base), "experts": [{"model": str(e)} for e in models.experts], "method": "average"})
    sources = find_sources(recipe)
    order = Order(recipe, sources, Path(), None, make_plan(recipe, sources).digest, Path.cwd(), gathered={})
    return pickle.dumps(replace(order, **changes))


def test_a_machine_that_sees_other_files_says_so(models: Models, tmp_path: Path) -> None:
    order = packed_order(models)
    *names, record = write_shard(order, "model.safetensors", tmp_path, "cpu", 1)
    assert isinstance(record, dict)
    assert [tensor["name"] for tensor in record["tensors"]] == names
    with pytest.raises(MergeError, match=r"^machine .* cannot take part: a model or its date, or the version"):
        next(write_shard(packed_order(models, digest="other"), "model.safetensors", tmp_path, "cpu", 1))
    other = packed_order(models, relative_to=Path("not there"))
    shutil.move(models.base, tmp_path / "moved")
    with pytest.raises(MergeError, match=r"cannot take part: .*base"):
        next(write_shard(other, "model.safetensors", tmp_path, "cpu", 1))


@pytest.mark.parametrize("name", [method.name for method in all_methods() if method.statistics])
def test_what_a_statistics_pass_gathers_means_the_same_in_another_process(name: str, models: Models) -> None:
    recipe = make_recipe({"base": str(models.base), "experts": [{"model": str(e)} for e in models.experts], "method": name})
    plan = make_plan(recipe, find_sources(recipe))
    gathered = gather_statistics(plan, torch.device("cpu"), SilentProgress())
    packed = cloudpickle.dumps(gathered)
    assert len(packed) < 10_000_000
    travelled = pickle.loads(packed)
    for tensor in plan.tensors:
        key = (tensor.method, tensor.options)
        here = merge_tensor(plan, tensor, torch.device("cpu"), gathered.get(key)).value
        assert torch.equal(here, merge_tensor(plan, tensor, torch.device("cpu"), travelled.get(key)).value)


def test_what_was_measured_on_data_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path))
    gram = torch.eye(3, dtype=torch.float64)
    measured = Measured({"red": [keep("some key", lambda: {"layer": gram})]})
    packed = cloudpickle.dumps(measured)
    assert gram.numpy().tobytes() not in packed
    assert torch.equal(pickle.loads(packed).of("red", "layer"), gram)


def test_what_cannot_travel_is_refused(models: Models) -> None:
    order = pickle.loads(packed_order(models))
    with pytest.raises(InputError, match="what somebodys_method gathered cannot be sent to other processes"):
        ray_engine._packed(order, {("somebodys_method", None): (letter for letter in "no")})
