"""An output folder is absent or whole; interrupted work is reused only when nothing changed."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

import acemerge
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError
from acemerge.execute import local
from acemerge.execute.pipeline import run_merge
from acemerge.output import writer
from acemerge.output.resources import check_space
from acemerge.output.staging import staged_output
from acemerge.output.writer import write_safetensors
from acemerge.recipe.recipe import make_recipe
from interruption import stop_at
from small_models import Models, write_models

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6))
def test_streamed_files_load_like_the_librarys_own(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("streamed") / "x.safetensors"
    tensors = {f"t{i}": torch.rand(shape).mul(5).to(getattr(torch, dtype)) for i, (dtype, shape) in enumerate(kinds)}
    headers = [(name, TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape))) for name, t in tensors.items()]
    digest = write_safetensors(path, headers, tensors.values())
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[n].equal(t) and loaded[n].dtype == t.dtype for n, t in tensors.items())
    assert len(path.read_bytes()) <= len(save(tensors, {"format": "pt"})) + 8
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_each_tensors_own_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(300, 7), "b": torch.arange(5), "empty": torch.zeros(0, 3)}
    headers = [(name, TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape))) for name, t in tensors.items()]
    hashes: dict[str, str] = {}
    write_safetensors(tmp_path / "x.safetensors", headers, tensors.values(), hashes)
    assert hashes == {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def test_one_tensor_is_written_while_the_next_is_made_and_never_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def values() -> Iterator[torch.Tensor]:
        nonlocal most
        for _ in range(6):
            value = torch.rand(200_000)
            alive.add(value)
            most = max(most, len(alive))
            yield value
            del value

    headers = [(f"t{i}", TensorHeader("float32", (200_000,))) for i in range(6)]
    write_safetensors(tmp_path / "x.safetensors", headers, values())
    assert most == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_an_error_while_writing_behind_is_raised() -> None:
    headers = [(f"t{i}", TensorHeader("float32", (50_000,))) for i in range(4)]
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(Path("/dev/full"), headers, (torch.rand(50_000) for _ in headers))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_error_on_the_way_to_the_disk_is_raised_even_if_told_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer, "_SYNCED_AT_ONCE", 1000)
    monkeypatch.setattr("os.fsync", fsync)
    headers = [(f"t{i}", TensorHeader("float32", (300,))) for i in range(2)]  # two that are synced at once, and the end
    with pytest.raises(OSError, match="Input/output error"):
        write_safetensors(tmp_path / "x.safetensors", headers, (torch.rand(300) for _ in headers))
    assert len(calls) == failing


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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


def test_an_interrupted_merge_goes_on_and_gives_the_same_bytes(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "whole", shard_size="1kB")
    done = interrupt(models, tmp_path / "out", monkeypatch)
    assert len(done) > 1
    assert (tmp_path / "out.partial").is_dir()
    calls = count_calls(monkeypatch)
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB")
    assert done[0] not in calls
    assert "layers.1.weight" in calls
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("change", ["option", "input", "shard", "no resume"])
def test_stale_shards_are_never_reused(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    done = interrupt(models, tmp_path / "out", monkeypatch)
    options: dict[str, object] = {}
    if change == "option":
        options["epsilon"] = 0.1
    elif change == "input":
        os.utime(models.base / "model.safetensors", (1, 1))
    elif change == "shard":
        finished = min((tmp_path / "out.partial").glob("*.safetensors"))
        finished.write_bytes(finished.read_bytes()[:-4] + b"\0\0\0\0")
    else:
        options["resume"] = False
    calls = count_calls(monkeypatch)
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", **options)  # type: ignore[arg-type]
    assert done[0] in calls


def test_nothing_stays_when_nothing_was_finished(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "merge_tensor", stop_at("layers.1.weight", []))
    with pytest.raises(KeyboardInterrupt):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_an_existing_output_is_refused_without_overwrite(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(InputError, match="pass --overwrite"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="average")
    assert tree(tmp_path / "out") == before
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="average", overwrite=True)
    assert tree(tmp_path / "out") != before
    assert not list(tmp_path.glob("out.*"))


def test_overwrite_never_deletes_what_acemerge_did_not_make(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not an acemerge output"):
        acemerge.merge(models.base, models.experts, models.experts[0], overwrite=True)
    assert (models.experts[0] / "model.safetensors").is_file()


def test_an_input_is_never_overwritten_even_if_acemerge_made_it(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "first")
    with pytest.raises(InputError, match="is, holds or lies in the model first"):
        acemerge.merge(tmp_path / "first", models.experts, tmp_path / "first", overwrite=True)


def test_a_users_folder_with_the_staging_name_is_left_alone(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not acemerge's"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out.partial/thesis.txt").read_text() == "mine"


def test_a_failed_overwrite_leaves_the_old_output(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    before = tree(tmp_path / "out")
    monkeypatch.setattr(local, "merge_tensor", stop_at("layers.1.weight", []))
    with pytest.raises(KeyboardInterrupt):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="average", overwrite=True)
    assert tree(tmp_path / "out") == before


def test_a_second_run_into_the_same_output_is_refused(tmp_path: Path) -> None:
    with (
        staged_output(tmp_path / "out", "", resume=True),
        pytest.raises(InputError, match="another acemerge process"),
        staged_output(tmp_path / "out", "", resume=True),
    ):
        pass


def test_nothing_local_in_the_documents(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    for name in ("README.md", "acemerge.yaml", "acemerge_manifest.json"):
        text = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in text
        assert not re.search(r"[\s\"'](/\w+)+/", text)
        assert sys.prefix not in text


def test_input_hashes_are_written_and_checked(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    recipe = yaml.safe_load((tmp_path / "out/acemerge.yaml").read_text())
    expected = hashlib.sha256((models.base / "model.safetensors").read_bytes()).hexdigest()
    assert recipe["inputs"]["base"]["model.safetensors"] == expected
    assert expected in (tmp_path / "out/README.md").read_text()


def test_every_tensor_is_accounted_for(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())
    base, output = (load_file(folder / "model.safetensors") for folder in (models.base, tmp_path / "out"))
    assert {t["name"] for t in manifest["tensors"]} == base.keys() == output.keys()
    assert sum(manifest["totals"][a] for a in ("merged", "averaged", "kept", "copied")) == len(base)
    assert (
        manifest["outputs"]["model.safetensors"] == hashlib.sha256((tmp_path / "out/model.safetensors").read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("method", ["dare_task_arithmetic", "dare_ties", "della"])
def test_random_methods_do_not_depend_on_shards_threads_or_order(models: Models, tmp_path: Path, method: str) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "one", method=method, seed=3)
    turned = models.experts[::-1]
    acemerge.merge(models.base, turned, tmp_path / "many", method=method, seed=3, shard_size="1kB", threads=2)
    one = load_file(tmp_path / "one/model.safetensors")
    many = {k: v for path in (tmp_path / "many").glob("*.safetensors") for k, v in load_file(path).items()}
    assert one.keys() == many.keys()
    for name, weight in one.items():
        torch.testing.assert_close(many[name], weight, rtol=0, atol=1e-6)


def test_an_output_around_or_inside_an_input_is_refused(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    with pytest.raises(InputError, match="is, holds or lies in"):
        acemerge.merge(models.base, [tmp_path / "out/model.safetensors"], tmp_path / "out", overwrite=True)
    with pytest.raises(InputError, match="is, holds or lies in"):
        acemerge.merge(models.base, models.experts, models.base / "out")
    inside = write_models(tmp_path / "out" / "sub").experts[0]
    with pytest.raises(InputError, match="which acemerge did not write"):
        acemerge.merge(models.base, [inside], tmp_path / "out", overwrite=True)
    assert inside.is_dir()


def test_overwrite_keeps_what_the_user_put_into_an_output(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    (tmp_path / "out/my_eval.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'my_eval\.txt', which acemerge did not write"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", overwrite=True)
    (tmp_path / "out/my_eval.txt").unlink()
    acemerge.merge(models.base, models.experts, tmp_path / "out", overwrite=True)


def test_an_empty_folder_is_as_good_as_none_and_a_link_is_refused(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a link"):
        acemerge.merge(models.base, models.experts, tmp_path / "link")


def test_home_is_understood_in_the_output(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert acemerge.merge(models.base, models.experts, "~/out").output == tmp_path / "out"


def test_inputs_that_are_not_the_expected_ones_are_refused_before_any_work(models: Models, tmp_path: Path) -> None:
    recipe = make_recipe(
        {
            "base": str(models.base),
            "experts": [str(e) for e in models.experts],
            "inputs": {"base": {"model.safetensors": "0" * 64}},
        }
    )
    with pytest.raises(InputError, match="the recipe expects 0000"):
        run_merge(recipe, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_space_that_an_interrupted_run_has_taken_counts(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(models, tmp_path / "out", monkeypatch)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    written = sum(path.stat().st_size for path in (tmp_path / "out.partial").iterdir())
    assert check_space(tmp_path / "out", written) is None
    assert "make room" in (check_space(tmp_path / "out", written + 1) or "")
