"""Disks, memory, permissions and signals under a merge: one clear error, no output, nothing of the user's deleted."""

import ctypes
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import acemerge
from acemerge.errors import MergeError
from acemerge.execute import shard
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from child import command, fork, in_child, wait, with_own_mounts
from interruption import one_by_one
from merging_child import ended_well, merge_command, merged_bytes
from small_models import Models, write_model, write_models


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
    assert f"{tmp_path}/disk/out: cannot be written (No space left on device) and was not published." in err


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
    assert "out: cannot be written (File too large) and was not published." in err
    assert not list(tmp_path.glob("out*"))


def test_failing_to_write_keeps_finished_shards(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> MergedTensor:
        if arguments[1].name == "layers.1.weight":  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        return merge_tensor(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(full))
    with pytest.raises(MergeError, match=r"Finished shards are kept in out\.partial"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB")
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.partial"]


@pytest.mark.parametrize(
    ("forbidden", "complaint"),
    [
        ("", "is not a writable folder"),
        ("model.safetensors", "expert-0/model.safetensors: cannot be read; you lack the permission"),
        ("config.json", "config.json: cannot be read (Permission denied)"),
        (".", "expert-0: you lack the permission to read this folder"),
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


# --- signals and exit codes --------------------------------------------------------------------------------------------
def interrupted(models: Models, output: Path, work: Callable[[], object]) -> tuple[int, str]:
    """Ctrl-C during a merge that does `work` instead of merging a tensor."""
    reader, writer = os.pipe()

    def at_work(*_: object) -> None:
        os.write(writer, b".")
        work()

    def merge() -> None:
        setattr(shard, "merge_tensor_at_points", one_by_one(at_work))  # noqa: B010  (in the child only)
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
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(lambda *_: 1 / 0))
    code, err = ended_well(in_child(merge_command(models, tmp_path / "out")))
    assert code == 1
    assert "acemerge: error: unexpected ZeroDivisionError: division by zero; nothing was published. This is a bug" in err
    assert not list(tmp_path.glob("out*"))


def test_where_another_library_would_crash_the_process_ends_at_once(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LostError(MergeError):
        ends_the_process = True

    def lose(*_: object) -> MergedTensor:
        raise LostError("the cluster is lost")

    def work() -> None:
        merge = merge_command(models, tmp_path / "out")
        try:
            merge()
        finally:
            os.write(2, b"not at once")

    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(lose))
    code, err = ended_well(in_child(work))
    assert code == 1
    assert "acemerge: error: the cluster is lost" in err
    assert "not at once" not in err
