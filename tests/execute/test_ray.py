"""The cluster engine on a real cluster of this machine with two workers: same bytes, whoever dies on the way.

Workers are other processes, so what a test does to a worker it does in the function that the worker runs. Tests that end workers
come last: a new worker imports torch, which takes longer than its work.
"""

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from safetensors.torch import load_file, save_file

import acemerge
import model_zoo
from acemerge import InputError, MergeError, PreflightError
from acemerge.execute import ray_cluster as ray_engine
from acemerge.execute import shard
from acemerge.execute.engines.registry import Work
from acemerge.execute.ray_task import Part, write_shard
from acemerge.planning.progress import Progress
from data_statistics import write_rows
from interruption import one_by_one, stop_at
from random_models import DTYPES, Case
from running import run_command
from small_models import Models, merge_into_shards, tree, write_models

Task = Callable[[Any, Part, str, int], Iterator[Any]]


@dataclass
class Started:
    """A cluster that a merge started, and that merge."""

    merged: Path
    models: Models
    stops: int = 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Two workers, for all tests that need them: started by a merge that found none. Its stopping waits until all are done."""
    folder = tmp_path_factory.mktemp("first")
    started = Started(folder / "merged", write_models(folder / "models"))

    def stop() -> None:
        started.stops += 1

    with (
        tempfile.TemporaryDirectory(prefix="ace", dir="/tmp", ignore_cleanup_errors=True) as short,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", short)  # Ray makes sockets in it, whose paths must be short
        patch.setenv("RAY_worker_niceness", "0")  # where other tests use every core, nicer ones would wait for minutes
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            with pytest.MonkeyPatch.context() as starting:
                starting.setattr(ray, "init", partial(ray.init, num_cpus=2))
                starting.setattr(ray, "shutdown", stop)
                merge_into_shards(started.models, started.merged, "ace", engine="ray")
            yield started
        finally:
            ray.shutdown()
            assert not ray.is_initialized()


def wait_for(file: Path) -> str:
    """What a worker wrote."""
    deadline = time.monotonic() + 120
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return file.read_text()


def hanging_once(first: Path) -> Task:
    """The work on a shard; the first worker to have merged a tensor says which process it is, and goes no further."""

    def task(order: Any, part: Part, device: str, threads: int) -> Iterator[Any]:

        for message in write_shard(order, part, device, threads):
            yield message
            try:
                with first.open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                continue
            time.sleep(1000)

    return task


def is_alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_without_a_cluster_one_is_started_and_stopped(cluster: Started, tmp_path: Path) -> None:
    merge_into_shards(cluster.models, tmp_path / "local", "ace")
    assert tree(cluster.merged) == tree(tmp_path / "local")
    assert cluster.stops == 1


@pytest.mark.usefixtures("cluster")
def test_what_a_local_run_finished_is_not_done_again(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_into_shards(models, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", [])))
        with pytest.raises(KeyboardInterrupt):
            merge_into_shards(models, tmp_path / "out")
    finished = json.loads((tmp_path / "out.partial" / ".acemerge-state.json").read_text())["finished"].keys()
    started: set[str] = set()

    def noting(engine: Any, work: Work, progress: Progress) -> None:
        started.update(work.shards)
        run(engine, work, progress)

    run = ray_engine.RayEngine.run
    monkeypatch.setattr(ray_engine.RayEngine, "run", noting)
    merge_into_shards(models, tmp_path / "out", engine="ray")
    assert finished
    assert started
    assert not finished & started
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("cluster")
def test_a_cluster_without_room_is_reported_before_any_work(models: Models, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="none of its 1 machines has 1000 CPUs"):
        merge_into_shards(models, tmp_path / "out", engine="ray", threads=1000)
    with pytest.raises(InputError, match=r"has called ray\.init already"):
        merge_into_shards(models, tmp_path / "out", engine="ray", ray_address="auto")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", ["ace", "ties"])  # ties has a pass over the whole model first
def test_a_sweep_gives_the_bytes_of_a_local_one(models: Models, tmp_path: Path, method: str) -> None:
    settings = {"alpha": [0.5, 1.0], **({"epsilon": [1e-5, 1e-3]} if method == "ace" else {"keep": [0.2, 0.4]})}
    for engine in ("local", "ray"):
        acemerge.sweep(models.base, models.experts, tmp_path / engine, settings, method, shard_size="1kB", engine=engine)
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert len(list((tmp_path / "ray").glob("*/model-00002-of-*.safetensors"))) == 4


@pytest.mark.usefixtures("cluster")
def test_what_is_measured_on_data_is_measured_once_and_read_by_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_zoo.quiet_transformers():
        models = model_zoo.bert(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts)
    outputs = []
    for engine in ("local", "ray"):
        monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / f"cache-{engine}"))
        outputs.append(tmp_path / engine)
        with model_zoo.quiet_transformers():
            acemerge.merge(models.base, models.experts, outputs[-1], "regmean", data=rows, engine=engine, threads=1)
    assert tree(outputs[1]) == tree(outputs[0])


@pytest.mark.usefixtures("cluster")
def test_a_users_error_reads_as_it_does_locally_and_is_not_tried_again(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = models.experts[1] / "model.safetensors"
    save_file(load_file(file) | {"layers.1.weight": torch.full((6, 12), torch.nan)}, file, metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path / "models")  # relative paths mean the same in another process
    ends = []
    for engine in ("local", "ray"):
        arguments = ("merge", "base", "expert-0", "expert-1", "-o", "out", "--shard-size", "1kB", "-q", "--engine", engine)
        ends.append((run_command(monkeypatch, *arguments), capfd.readouterr().err))
        assert not Path("out").exists()
    assert ends[0][0] == 1
    assert "layers.1.weight" in ends[0][1]
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_is_replaced_and_the_bytes_are_those_of_a_local_merge(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    merge_into_shards(models, tmp_path / "local")
    monkeypatch.setattr(ray_engine, "write_shard", hanging_once(tmp_path / "first"))
    killing = Thread(target=lambda: os.kill(int(wait_for(tmp_path / "first")), signal.SIGKILL))
    killing.start()
    merge_into_shards(models, tmp_path / "ray", engine="ray", quiet=False)
    killing.join()
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert [path.name for path in tmp_path.glob("ray*")] == ["ray"]
    err = capfd.readouterr().err
    assert "its worker died" in err
    assert "try 2 of 4" in err
    assert "6/6 tensors" in err


@pytest.mark.usefixtures("cluster")
def test_a_shard_that_kills_every_worker_ends_the_merge(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deadly(order: Any, part: Part, device: str, threads: int) -> Iterator[Any]:
        if part.shard.startswith("model-00002"):
            os.kill(os.getpid(), signal.SIGKILL)

        yield from write_shard(order, part, device, threads)

    monkeypatch.setattr(ray_engine, "TRIES", 2)
    monkeypatch.setattr(ray_engine, "write_shard", deadly)
    with pytest.raises(MergeError, match=r"^model-00002.*its worker died 2 times"):
        merge_into_shards(models, tmp_path / "out", engine="ray")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("cluster")
def test_interrupting_ends_the_workers_and_leaves_nothing(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "write_shard", hanging_once(tmp_path / "first"))
    monkeypatch.setattr(ray_engine._Run, "_finish", lambda *_: None)  # so that nothing is left for a later run

    def interrupt() -> None:
        wait_for(tmp_path / "first")
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            merge_into_shards(models, tmp_path / "out", engine="ray")
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, handler)
    assert not list(tmp_path.glob("out*"))
    assert not is_alive(int(wait_for(tmp_path / "first")))


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_is_lost_is_named() -> None:
    """Whole clusters are killed by benchmarks/ray_deaths.py."""
    daemons = ray_engine.Daemons.of_this_machine()
    daemons.check()
    assert set(daemons.addresses) == {"head", "raylet of this machine"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    lost = replace(daemons, addresses={**daemons.addresses, "head": ("127.0.0.1", port)})
    with pytest.raises(MergeError, match=rf"the head \(127\.0\.0\.1:{port}\) no longer answers .* nothing was published"):
        lost.check()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("seed", range(3))
def test_random_models_have_the_bytes_of_a_local_merge(tmp_path: Path, seed: int) -> None:
    shapes = tuple((4 + 5 * seed, 7 + i) for i in range(4))
    case = Case((*shapes, (9,), ()), DTYPES[seed], 3, ("ace_auto", "tsv_m", "ties")[seed], seed)
    models = case.write(tmp_path / "models")
    local = tree(case.merge(models, tmp_path / "local"))
    assert tree(case.merge(models, tmp_path / "ray", engine="ray")) == local


def test_a_machine_without_acemerge_is_reported() -> None:
    cause = RuntimeError("The remote function failed to import on the worker. This may be because ...")
    error = RayTaskError("write_shard", "a traceback: failed to import on the worker", cause)
    assert "install the same on every one" in str(ray_engine._as_locally(error))
    assert ray_engine._as_locally(RayTaskError("write_shard", "a traceback", MergeError("as it is"))).args == ("as it is",)
