"""Inputs that change under a merge, or between two runs of it, are noticed."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from blake3 import blake3
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.errors import InputError, MergeError
from acemerge.execute import shard
from acemerge.execute.opening import find_sources, make_plan
from acemerge.execute.pipeline import run_merge
from acemerge.output.input_hashes import InputHashes
from acemerge.output.manifest import read_merge
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.planning.view import View
from acemerge.recipe.recipe import Recipe, make_recipe
from acemerge.recipe.run_options import RunOptions
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from child import in_child
from interruption import interrupt, one_by_one, stop_at
from merging_child import merge_command, merged_bytes
from small_models import Models, write_model


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
    monkeypatch.setattr(
        shard, "merge_tensor_at_points", one_by_one(meddling(lambda: change(path), names[-1] if last else "layers.0.weight"))
    )
    if last:  # all reads of the merge are over
        monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(late(change, path, names[-1])))
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
    expert = write_model(tmp_path / "expert", {"a.weight": 1.1 * tensors["a.weight"]})
    models = Models(write_model(tmp_path / "base", tensors), [expert])
    original = View.to_method
    calls: list[torch.Tensor] = []

    def shrink(view: View, stored: torch.Tensor) -> torch.Tensor:
        calls.append(stored)
        if len(calls) == 2:  # the expert's
            os.truncate(tmp_path / "expert/model.safetensors", 200)
        return original(view, stored)

    monkeypatch.setattr(View, "to_method", shrink)
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


def interrupt_hashed(models: Models, output: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
    """When the hashes on the side are there, however busy the machine is."""
    with monkeypatch.context() as patched:
        patched.setattr(InputHashes, "known", InputHashes.all)
        interrupt(models, output, monkeypatch, **options)


def test_verify_notices_an_input_that_only_its_content_betrays(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_hashed(models, tmp_path / "out", monkeypatch, verify=True)
    edit_silently(models.experts[0] / "model.safetensors")
    acemerge.merge(models.base, models.experts, tmp_path / "fresh", shard_size="1kB")
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", verify=True)
    assert merged_bytes(tmp_path / "out") == merged_bytes(tmp_path / "fresh")


def test_without_verify_such_an_input_is_noticed_before_publishing(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_hashed(models, tmp_path / "out", monkeypatch)
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
    interrupt_hashed(models, tmp_path / "out", monkeypatch)
    calls: list[str] = []
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("", calls)))
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
        interrupt_hashed(models, tmp_path / "out", monkeypatch)
        acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size="1kB", quiet=False, **options)
        assert said in capsys.readouterr().err
        shutil.rmtree(tmp_path / "out")


def test_input_hashes_are_written_and_checked(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    recipe = yaml.safe_load((tmp_path / "out/acemerge.yaml").read_text())
    expected = f"blake3:{blake3((models.base / 'model.safetensors').read_bytes()).hexdigest()}"
    assert recipe["inputs"]["base"]["model.safetensors"] == expected
    assert expected in (tmp_path / "out/README.md").read_text()


def expecting(models: Models, told: str) -> Recipe:
    return make_recipe(
        {
            "base": str(models.base),
            "experts": [str(expert) for expert in models.experts],
            "inputs": {"base": {"model.safetensors": told}},
        }
    )


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_inputs_that_are_not_the_expected_ones_are_refused_before_any_work(
    models: Models, tmp_path: Path, algorithm: str
) -> None:
    with pytest.raises(InputError, match=f"hash is {algorithm}:[0-9a-f]+, the recipe expects {algorithm}:0000"):
        run_merge(expecting(models, f"{algorithm}:{'0' * 64}"), tmp_path / "out", RunOptions())
    assert not list(tmp_path.glob("out*"))


def test_a_recipe_may_expect_what_the_hub_tells_of_a_file(models: Models, tmp_path: Path) -> None:
    """Its SHA-256, of a copy whose name is not its hash."""
    told = f"sha256:{hashlib.sha256((models.base / 'model.safetensors').read_bytes()).hexdigest()}"
    run_merge(expecting(models, told), tmp_path / "out", RunOptions())
    assert read_merge(tmp_path / "out").inputs["base"] == {"model.safetensors": told}


def test_a_hash_without_its_algorithm_is_refused(models: Models) -> None:
    with pytest.raises(InputError, match="is no hash; write blake3: or sha256: and its 64"):
        expecting(models, "0" * 64)


def test_a_name_in_the_hubs_cache_is_trusted_unless_verify_is_asked_for(models: Models, tmp_path: Path) -> None:
    content = (models.base / "model.safetensors").read_bytes()
    blob, snapshot = tmp_path / "hub" / "blobs" / ("0" * 64), tmp_path / "hub" / "snapshots" / "base"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(blob)
    true = f"sha256:{hashlib.sha256(content).hexdigest()}"
    for verify, told in ((False, f"sha256:{'0' * 64}"), (True, true)):
        output = tmp_path / f"verify-{verify}"
        run_merge(make_recipe({"base": str(snapshot), "experts": [str(models.experts[0])]}), output, RunOptions(verify=verify))
        assert read_merge(output).inputs["base"] == {"model.safetensors": told}
