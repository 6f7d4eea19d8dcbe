"""An output is published whole or not at all, and replaces only what acemerge made."""

import os
import shutil
from pathlib import Path

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.execute import shard
from acemerge.output import publishing
from interruption import one_by_one, stop_at
from small_models import Models, merge_into_shards, tree, write_models


def test_all_is_on_the_disk_before_it_is_published_and_then_its_place(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, early, late = tmp_path / "out", set[int](), set[int]()
    monkeypatch.setattr(os, "fsync", lambda file: (late if output.exists() else early).add(os.fstat(file).st_ino))
    merge_into_shards(models, output)
    published = [output, *output.rglob("*")]
    assert sum(path.is_dir() for path in published) > 3
    assert {path.stat().st_ino for path in published} <= early
    assert late == {tmp_path.stat().st_ino}


def test_a_kill_between_two_renames_is_undone(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot be exchanged, the earlier output is back after the next run's start, whatever becomes of that."""
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.replaced")
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", [])))
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


def test_a_failed_overwrite_leaves_the_old_output(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    before = tree(tmp_path / "out")
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", [])))
    with pytest.raises(KeyboardInterrupt):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="average", overwrite=True)
    assert tree(tmp_path / "out") == before


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
