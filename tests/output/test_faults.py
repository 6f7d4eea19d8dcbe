"""Disk, memory, signals, and inputs that change under a merge: one clear error, no output, nothing of the user's deleted."""

import ctypes
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.errors import InputError, MergeError
from acemerge.execute import local
from acemerge.execute.pipeline import find_sources, make_plan
from acemerge.output import publishing, resources
from acemerge.output.resources import check_memory, needed_space
from acemerge.planning.plan import Plan, PlannedTensor
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors import task_vectors
from acemerge.tensors.task_vectors import MergedTensor, merge_tensor
from child import CANNOT_MOUNT, Ended, command, fork, in_child, wait, with_own_mounts
from interruption import stop_at
from small_models import Models, write_model, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def merge_command(models: Models, output: Path, *flags: object) -> Callable[[], None]:
    return lambda: command("merge", *models.arguments, "-o", output, "-q", *flags)


def ended_well(ended: Ended) -> tuple[int, str]:
    if ended.code == CANNOT_MOUNT:
        pytest.skip("needs the right to mount")
    assert "Traceback" not in ended.err
    return ended.code, ended.err


# --- disk --------------------------------------------------------------------------------------------------------------


def on_a_disk(folder: Path, size: str, work: Callable[[], object], *more: list[str]) -> tuple[int, str]:
    """Do some work in a child for which `folder` is a small disk of its own."""
    folder.mkdir(exist_ok=True)

    def there() -> None:
        with_own_mounts(["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], *more)
        work()

    return ended_well(in_child(there))


@pytest.mark.parametrize("size", ["8k", "20k", "28k", "36k"])
def test_a_disk_that_fills_up(models: Models, tmp_path: Path, size: str) -> None:
    """Room for no shard, one, two, three; --force because the plan sees it coming."""

    def work() -> None:
        try:
            merge_command(models, tmp_path / "disk/out", "--shard-size", "1kB", "--force")()
        finally:
            assert {path.name for path in (tmp_path / "disk").iterdir()} <= {"out.partial"}

    code, err = on_a_disk(tmp_path / "disk", size, work)
    assert code == 1
    assert f"{tmp_path}/disk/out: cannot be written (No space left on device). Nothing was published." in err


def test_a_disk_that_is_too_small_is_refused_before_any_work(models: Models, tmp_path: Path) -> None:
    code, err = on_a_disk(tmp_path / "disk", "4k", merge_command(models, tmp_path / "disk/out"))
    assert code == 2
    assert "make room, use another disk, or pass --force to try" in err


def test_a_read_only_disk(models: Models, tmp_path: Path) -> None:
    again = ["-o", "remount,ro", str(tmp_path / "disk")]
    code, err = on_a_disk(tmp_path / "disk", "1M", merge_command(models, tmp_path / "disk/out"), again)
    assert (code, "is not a writable folder" in err) == (2, True)


def test_the_root_of_a_disk_is_no_output(models: Models, tmp_path: Path) -> None:
    code, err = on_a_disk(tmp_path / "disk", "1M", merge_command(models, tmp_path / "disk"))
    assert (code, "is the root of a file system" in err) == (2, True)


def test_an_output_on_another_file_system_than_the_inputs(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "here")

    def work() -> None:
        merge_command(models, tmp_path / "disk/out")()
        assert merged_bytes(tmp_path / "disk/out") == merged_bytes(tmp_path / "here") != {}

    assert on_a_disk(tmp_path / "disk", "1M", work)[0] == 0


def test_a_file_that_may_not_grow_further(models: Models, tmp_path: Path) -> None:
    """The same without the right to mount: a limit on the size of files."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        merge_command(models, tmp_path / "out")()

    code, err = ended_well(in_child(work))
    assert code == 1
    assert "out: cannot be written (File too large). Nothing was published." in err
    assert not list(tmp_path.glob("out*"))


def test_failing_to_write_keeps_finished_shards(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> MergedTensor:
        if arguments[1].name == "layers.1.weight":  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        return merge_tensor(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(local, "merge_tensor", full)
    with pytest.raises(MergeError, match=r"Finished shards are kept in out\.partial"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB")
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.partial"]


@pytest.mark.parametrize(
    ("forbidden", "complaint"),
    [
        ("", "is not a writable folder"),
        ("model.safetensors", "expert-0/model.safetensors: cannot be read; you lack the permission"),
        ("config.json", "config.json: cannot be read (Permission denied)"),
    ],
)
def test_inputs_and_outputs_without_permission(tmp_path: Path, forbidden: str, complaint: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        place = Path(name)
        models = write_models(place / "models")
        (place / "open").mkdir()
        place.chmod(0o755)
        for path in place.glob("models/*/*"):
            path.chmod(0o644)

        def work() -> None:
            command("plan", *models.arguments)  # imports what another user may not be able to read
            (place / "open").chmod(0o777 if forbidden else 0o555)
            if forbidden:
                (models.experts[0] / forbidden).chmod(0)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            merge_command(models, place / "open/out")()

        code, err = ended_well(in_child(work))
        assert (code, complaint in err) == (2, True), err
        assert not list((place / "open").iterdir())


@pytest.mark.parametrize("method", ["ace", "emr", "tall_mask", "twin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_space_check_covers_all_that_is_written(tmp_path: Path, method: str, dtype: str) -> None:
    """Of per-task methods, shared/ and tasks/ too, which a merge of T experts can make larger than the model."""
    generator = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.randn(300, 200, generator=generator), "b.bias": torch.randn(5000, generator=generator)}
    write_model(tmp_path / "base", base)
    names = [f"expert-{i}" for i in range(4)]
    for name in names:
        changed = {k: w + 0.1 * torch.randn(w.shape, generator=generator) for k, w in base.items()}
        write_model(tmp_path / name, changed | {"classifier.weight": torch.randn(30, 200)})
    result = acemerge.merge(tmp_path / "base", [tmp_path / n for n in names], tmp_path / "out", method=method, dtype=dtype)
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    predicted = needed_space(result.plan)
    assert written < predicted < 2.5 * written + 50_000


# --- memory ------------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_unless_forced(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_memory", lambda: 100)
    with pytest.raises(InputError, match=r"needs about .* 100 B are free; .* or pass --force to try"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    acemerge.merge(models.base, models.experts, tmp_path / "out", force=True)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    inner = tmp_path / "groups/outer/inner"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/outer/inner\n")
    for folder, limit in ((inner, "max"), (inner.parent, "5000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text("anon 2000\nfile 900000\n")
    assert resources._container_memory(tmp_path / "groups", tmp_path / "own") == 3000
    assert resources._container_memory(tmp_path / "groups", tmp_path / "nowhere") is None


def test_the_machines_own_memory_is_known() -> None:
    free = resources.available_memory()
    assert 10_000_000 < free < 10**15
    assert check_memory(10**18) is not None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of a process's memory")
def test_running_out_of_memory_is_one_sentence(tmp_path: Path) -> None:
    """An address space in which the program fits, and the largest tensor's work does not."""
    write_model(tmp_path / "base", {"big.weight": torch.zeros(40_000, 500)})
    write_model(tmp_path / "expert", {"big.weight": torch.ones(40_000, 500)})
    models = Models(tmp_path / "base", [tmp_path / "expert"])

    def work() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)
        merge_command(models, tmp_path / "out")()

    code, err = ended_well(in_child(work))
    assert code == 1
    assert "acemerge: error: out of memory; nothing was published" in err
    assert not list(tmp_path.glob("out*"))


# --- inputs that change ------------------------------------------------------------------------------------------------


def meddling(change: Callable[[], None], at: str) -> Callable[..., MergedTensor]:
    """A merge_tensor during which somebody else does something."""

    def merge(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: object) -> MergedTensor:
        if planned.name == at:
            change()
        return merge_tensor(plan, planned, device, statistics)

    return merge


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def replace(path: Path) -> None:
    shutil.copy2(path, path.with_name("new"))
    path.with_name("new").rename(path)


@pytest.mark.parametrize("change", [truncate, rewrite, replace, Path.unlink])
@pytest.mark.parametrize("last", [False, True])
def test_an_input_that_changes_while_it_is_merged(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], last: bool
) -> None:
    """Noticed at the next read or, if there is none, before anything is published."""
    path = models.experts[1] / "model.safetensors"
    names = [tensor.name for tensor in acemerge.merge(models.base, models.experts, tmp_path / "first").plan.tensors]
    monkeypatch.setattr(local, "merge_tensor", meddling(lambda: change(path), names[-1] if last else "layers.0.weight"))
    if last:  # all reads of the merge are over
        monkeypatch.setattr(local, "merge_tensor", late(change, path, names[-1]))
    with pytest.raises(MergeError, match=r"expert-1/model\.safetensors: (was changed|cannot be read any more)"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def late(change: Callable[[Path], None], path: Path, name: str) -> Callable[..., MergedTensor]:
    def merge(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: object) -> MergedTensor:
        merged = merge_tensor(plan, planned, device, statistics)
        if planned.name == name:
            merged.value.clone()
            change(path)
        return merged

    return merge


def test_a_file_that_shrinks_under_a_read_ends_the_command_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check, in the middle of a read: the kernel sends SIGBUS."""
    tensors = {"a.weight": torch.randn(600, 600)}
    expert = write_model(tmp_path / "expert", {"a.weight": -tensors["a.weight"]})
    models = Models(write_model(tmp_path / "base", tensors), [expert])
    original = task_vectors._to_method
    calls: list[torch.Tensor] = []

    def shrink(stored: torch.Tensor, transposed: bool) -> torch.Tensor:
        calls.append(stored)
        if len(calls) == 2:  # the expert's
            os.truncate(tmp_path / "expert/model.safetensors", 200)
        return original(stored, transposed)

    monkeypatch.setattr(task_vectors, "_to_method", shrink)
    ended = in_child(merge_command(models, tmp_path / "out"))
    assert ended.code == 1
    assert "an input file shrank, or its disk failed" in ended.err
    assert not (tmp_path / "out").exists()


def edit_silently(path: Path) -> None:
    """Other content, same size and date."""
    before = path.stat()
    tensors = load_file(path)
    tensors["layers.0.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def interrupt(models: Models, output: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
    def slow_enough(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: object) -> MergedTensor:
        time.sleep(0.05)  # the hashes on the side must be there when the shard is
        return stop_at("layers.1.weight", [])(plan, planned, device, statistics)

    with monkeypatch.context() as patched:
        patched.setattr(local, "merge_tensor", slow_enough)
        with pytest.raises(KeyboardInterrupt):
            acemerge.merge(models.base, models.experts, output, shard_size="1kB", **options)  # type: ignore[arg-type]


def merged_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_verify_notices_an_input_that_only_its_content_betrays(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(models, tmp_path / "out", monkeypatch, verify=True)
    edit_silently(models.experts[0] / "model.safetensors")
    acemerge.merge(models.base, models.experts, tmp_path / "fresh", shard_size="1kB")
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", verify=True)
    assert merged_bytes(tmp_path / "out") == merged_bytes(tmp_path / "fresh")


def test_without_verify_such_an_input_is_noticed_before_publishing(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(models, tmp_path / "out", monkeypatch)
    edit_silently(models.experts[0] / "model.safetensors")
    with pytest.raises(MergeError, match="not what the interrupted run read"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB")
    assert not (tmp_path / "out").exists()
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", resume=False)


def test_a_header_counts_even_where_the_plan_does_not_use_it(models: Models) -> None:
    """Same size, same date, and a tensor that is copied from the base: an interrupted run's shards are not reused."""
    recipe = make_recipe({"base": str(models.base), "experts": [str(models.experts[0])]})
    before = make_plan(recipe, find_sources(recipe)).digest
    path = models.experts[0] / "model.safetensors"
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b'"I64"', b'"U64"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.read_bytes() != content
    assert make_plan(recipe, find_sources(recipe)).digest != before


def test_verify_reuses_shards_of_the_same_bytes(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(models, tmp_path / "out", monkeypatch)
    calls: list[str] = []
    monkeypatch.setattr(local, "merge_tensor", stop_at("", calls))
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", verify=True)
    assert 0 < len(calls) < 6


def test_what_became_of_an_interrupted_run_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "going on: "),
        ({"dtype": "float16"}, "starting over: "),
        ({"resume": False}, "starting over, as"),
    ]
    for options, said in cases:
        interrupt(models, tmp_path / "out", monkeypatch)
        acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", quiet=False, **options)
        assert said in capsys.readouterr().err
        shutil.rmtree(tmp_path / "out")


# --- signals and exit codes --------------------------------------------------------------------------------------------


def interrupted(models: Models, output: Path, work: Callable[[], object]) -> tuple[int, str]:
    """Ctrl-C during a merge that does `work` instead of merging a tensor."""
    reader, writer = os.pipe()

    def at_work(*_: object) -> None:
        os.write(writer, b".")
        work()

    def merge() -> None:
        setattr(local, "merge_tensor", at_work)  # noqa: B010  (in the child only)
        command("merge", *models.arguments, "-o", output)

    with tempfile.TemporaryFile("w+") as err:
        pid = fork(merge, err.fileno(), err.fileno())
        assert os.read(reader, 1) == b"."
        os.kill(pid, signal.SIGINT)
        code = wait(pid)
        err.seek(0)
        return code, err.read()


def uninterruptible() -> None:
    """As in a long matrix decomposition: Python cannot act on a signal before its end, but other threads run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    ctypes.CDLL(None).sleep(600)


def hidden() -> None:
    """As some libraries do."""
    try:
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape") from None


@pytest.mark.parametrize("work", [uninterruptible, hidden])
def test_an_interruption_is_prompt_and_says_how_to_go_on(models: Models, tmp_path: Path, work: Callable[[], None]) -> None:
    code, err = interrupted(models, tmp_path / "out", work)
    assert code == 130
    assert "repeat the command to go on" in err
    assert "ValueError" not in err
    assert not (tmp_path / "out").exists()


def test_the_unforeseen_is_one_sentence_too(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "merge_tensor", lambda *_: 1 / 0)
    code, err = ended_well(in_child(merge_command(models, tmp_path / "out")))
    assert code == 1
    assert "acemerge: error: unexpected ZeroDivisionError: division by zero; nothing was published. This is a bug" in err
    assert not list(tmp_path.glob("out*"))


# --- replacing an output -----------------------------------------------------------------------------------------------


def test_a_kill_between_two_renames_is_undone(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot be exchanged, the earlier output is back after the next run's start, whatever becomes of that."""
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.replaced")
    monkeypatch.setattr(local, "merge_tensor", stop_at("layers.1.weight", []))
    with pytest.raises(InputError, match="already exists"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize("occupied", [False, True])
def test_what_a_kill_left_aside_is_removed_and_what_is_the_users_is_not(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, occupied: bool
) -> None:
    monkeypatch.setattr(publishing, "exchange", lambda one, other: False)
    for name in ("out", "out.replaced"):
        acemerge.merge(models.base, models.experts, tmp_path / name)
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="average", overwrite=True)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced/thesis.txt").write_text("mine")
    if occupied:
        with pytest.raises(InputError, match=r"out\.replaced: needed .* move it away"):
            acemerge.merge(models.base, models.experts, tmp_path / "out", overwrite=True)
    else:
        shutil.rmtree(tmp_path / "out")
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out.replaced/thesis.txt").read_text() == "mine"


def test_a_lock_that_is_not_ours_is_left_alone(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out.partial.lock").write_text("mine")
    with pytest.raises(InputError, match="not acemerge's; move it away"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out.partial.lock").read_text() == "mine"


def test_a_lock_that_is_a_link_is_left_alone(models: Models, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "out.partial.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="not acemerge's; move it away"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out.partial.lock").is_symlink()


def test_the_lock_of_a_killed_run_does_not_block(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out.partial.lock").touch()
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
