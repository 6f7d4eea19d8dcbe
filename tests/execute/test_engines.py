"""Engines but for what needs a running cluster: several devices, what travels to other processes, mistakes."""

import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

import acemerge
from acemerge import InputError, MergeError
from acemerge.calibration.measured import Measured, keep
from acemerge.execute import local, together
from acemerge.execute import ray as ray_engine
from acemerge.execute.passes import gather_statistics
from acemerge.execute.pipeline import find_sources, make_plan
from acemerge.execute.ray_task import Order, write_shard
from acemerge.methods import Options, all_methods
from acemerge.output.resources import check_resources, needed_space
from acemerge.planning.plan import Plan
from acemerge.planning.progress import SilentProgress
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from child import command, in_child
from small_models import Models, merge_into_shards, tree, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path / "models")


# --- small tensors at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ace", "emr", "dare_ties"])
def test_tensors_merged_at_once_give_the_bytes_of_one_by_one(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "one", method=method)
    both, threads = Barrier(2), set()

    def at_once(*arguments: Any) -> MergedTensor:
        if get_ident() not in threads:
            threads.add(get_ident())
            both.wait(timeout=60)
        return merge_tensor(*arguments)

    monkeypatch.setattr(together, "_DEVICES", ("cpu",))
    monkeypatch.setattr(local, "merge_tensor", at_once)
    acemerge.merge(models.base, models.experts, tmp_path / "all", method=method, threads=2)
    assert len(threads) == 2
    assert tree(tmp_path / "all") == tree(tmp_path / "one")


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_tensors_at_once_are_neighbours_and_no_larger_than_a_large_one(sizes: list[int], entries: int) -> None:
    planned: Any = [SimpleNamespace(header=SimpleNamespace(elements=size)) for size in sizes]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(together, "_ENTRIES", entries)
        groups = together.together(planned, torch.device("cuda"))
        alone = together.together(planned, torch.device("cpu"))
    assert [tensor for group in groups for tensor in group] == planned
    assert alone == [[tensor] for tensor in planned]
    totals = [sum(tensor.header.elements for tensor in group) for group in groups]
    assert all(total <= entries or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    assert all(total + group[0].header.elements > entries for total, group in zip(totals, groups[1:], strict=False)), (
        "they would have fitted"
    )


def test_a_stream_of_its_own_waits_for_what_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @contextmanager
    def inside(stream: Any) -> Iterator[None]:
        done.append(f"in the stream of {stream.device}")
        yield
        done.append("out of it")

    def make_stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(device=device, wait_stream=lambda other: done.append(f"wait for {other}"))

    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default of {device}")
    monkeypatch.setattr(torch.cuda, "stream", inside)
    with together.own_stream(torch.device("cuda:1")):
        done.append("work")
    assert done == ["wait for the default of cuda:1", "in the stream of cuda:1", "work", "out of it"]


# --- several devices ---------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(local, "merge_tensor", together)
    merge_into_shards(models, tmp_path / "two", method, device="cpu,cpu", quiet=False)
    assert len(threads) == 2
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert "6/6 tensors" in capfd.readouterr().err


def test_a_failure_on_one_device_ends_the_work_on_all(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(plan: Plan, planned: PlannedTensor, *rest: Any) -> MergedTensor:
        if planned.name == "layers.1.weight":
            raise MergeError("this tensor is wrong")
        return merge_tensor(plan, planned, *rest)

    monkeypatch.setattr(local, "merge_tensor", failing)
    with pytest.raises(MergeError, match="this tensor is wrong"):
        merge_into_shards(models, tmp_path / "out", device="cpu,cpu")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    merge_into_shards(models, tmp_path / "out", device="cpu,cpu")
    merge_into_shards(models, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_more_at_once_needs_more(models: Models, tmp_path: Path) -> None:
    recipe = make_recipe(
        {"base": str(models.base), "experts": [{"model": str(e)} for e in models.experts], "method": "emr", "shard_size": "1kB"}
    )
    plan = make_plan(recipe, find_sources(recipe))
    assert len(plan.shards) == 2
    assert needed_space(plan, 2) == needed_space(plan, 100) == needed_space(plan) + plan.temporary_bytes
    assert check_resources(tmp_path / "out", plan, on_cpu=2) == []
    assert "memory" in check_resources(tmp_path / "out", plan, on_cpu=10**12)[0]


# --- what travels ------------------------------------------------------------------------------------------------------


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
    order = pickle.loads(packed_order(models))
    with pytest.raises(InputError, match="what somebodys_method gathered cannot be sent to other processes"):
        ray_engine._packed(order, {("somebodys_method", Options()): (letter for letter in "no")})


# --- from the user's side ---------------------------------------------------------------------------------------------


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray makes sockets in it, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ace", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.usefixtures("short_folder")
def test_without_a_cluster_one_is_started_and_stopped(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    merge_into_shards(models, tmp_path / "local", "ace")
    merge_into_shards(models, tmp_path / "ray", "ace", engine="ray")
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "rya"], "there is no such engine; did you mean 'ray'?"),
        (["--ray-address", "auto"], "only the cluster engine uses it; pass --engine ray too"),
        (["--engine", "ray", "--device", "cuda:1"], "give cpu, or cuda"),
        (["--engine", "ray", "--device", "cpu,cpu"], "give cpu, or cuda"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "no Ray cluster answers there"),
        (["--engine", "ray", "--ray-address", "ray://127.0.0.1:1"], "run acemerge on a machine of the cluster"),
        (["--engine", "ray", "--ray-address", "somewhere:else"], "no Ray cluster answers there"),
    ],
)
def test_mistakes_are_told_before_any_work(models: Models, tmp_path: Path, flags: list[str], message: str) -> None:
    ended = in_child(lambda: command("merge", *models.arguments, "-o", tmp_path / "out", *flags))
    assert ended.code == 2
    assert message in ended.err
    assert not list(tmp_path.glob("out*"))


def test_a_missing_ray_is_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'acemerge\[cluster\]'"):
        merge_into_shards(models, tmp_path / "out", engine="ray")
