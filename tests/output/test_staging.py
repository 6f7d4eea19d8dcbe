"""Where an output is made before it is published; interrupted work is reused only when nothing changed."""

import os
from pathlib import Path

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.execute import shard
from acemerge.output.staging import staged_output
from interruption import count_calls, interrupt, one_by_one, stop_at
from small_models import Models, tree


def test_a_lock_that_is_not_ours_is_left_alone(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out.partial.lock").write_text("mine")
    with pytest.raises(InputError, match="not acemerge's; move it away"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out.partial.lock").read_text() == "mine"


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
        options["ridge"] = 0.1
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
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", [])))
    with pytest.raises(KeyboardInterrupt):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_users_folder_with_the_staging_name_is_left_alone(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not acemerge's"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert (tmp_path / "out.partial/thesis.txt").read_text() == "mine"


def test_a_second_run_into_the_same_output_is_refused(tmp_path: Path) -> None:
    with (
        staged_output(tmp_path / "out", "", resume=True),
        pytest.raises(InputError, match="another acemerge process"),
        staged_output(tmp_path / "out", "", resume=True),
    ):
        pass
