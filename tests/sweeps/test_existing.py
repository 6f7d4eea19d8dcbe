"""What a sweep finds in its folder: points that are done are not done again, and those of others are left alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.execute import shard
from acemerge.sweeps.table import TABLE
from acemerge.tensors.computing import TensorMerge
from acemerge.tensors.merging import merge_tensor_at_points
from small_models import Models
from sweeping import ALPHAS, GRID, count_merges, distance_from_base, methods_merged, names_in


def test_points_that_are_done_are_not_done_again(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "grid"
    first = acemerge.sweep(models.base, models.experts, output, {"epsilon": [1e-5, 1e-3]}, "ace")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors")}
    seen = count_merges(monkeypatch)
    acemerge.sweep(models.base, models.experts, output, {"epsilon": [1e-5, 1e-3]}, "ace")
    assert seen == []
    larger = acemerge.sweep(models.base, models.experts, output, {"epsilon": [1e-5, 1e-4, 1e-3]}, "ace")
    assert set(seen) == {1}  # one point only
    assert [point.folder is not None for point in larger.points] == [True] * 3
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(first.points) == 2


def test_scores_are_kept_and_what_is_left_is_evaluated(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[float] = []

    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        if len(asked) == 2:
            asked.append(0.0)
            raise KeyboardInterrupt
        asked.append(settings["alpha"])
        return {"score": settings["alpha"]}

    with pytest.raises(KeyboardInterrupt):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=evaluate)
    assert names_in(tmp_path / "grid") == ["alpha=1.0", "alpha=2.0", TABLE]  # the best so far, and the one not evaluated
    methods = methods_merged(monkeypatch)
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=evaluate)
    assert methods == {"average"}  # to compare with; no point is merged again
    assert asked == [0.5, 2.0, 0.0, 1.0]
    assert result.best is not None
    assert result.best.settings == {"alpha": 2.0}
    assert names_in(tmp_path / "grid") == ["alpha=2.0", TABLE]


def test_another_evaluation_scores_anew(models: Models, tmp_path: Path) -> None:
    def smaller(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        return {"score": -settings["alpha"]}

    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=distance_from_base(models))
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=smaller)
    assert result.best is not None
    assert result.best.scores == {"score": -0.5}


def test_an_interrupted_pass_goes_on_from_its_shards(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "grid"

    def work() -> None:
        acemerge.sweep(models.base, models.experts, output, GRID, "ace", shard_size="1kB")

    def interrupted(merges: Sequence[TensorMerge], device: torch.device) -> Any:
        if merges[0].planned.name == "layers.1.weight":
            raise KeyboardInterrupt
        return merge_tensor_at_points(merges, device)

    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work()
    assert all(name == TABLE or name.endswith(".partial") for name in names_in(output))
    seen = count_merges(monkeypatch)
    work()
    assert 0 < len(seen) < 6
    assert not [name for name in names_in(output) if "partial" in name]
    acemerge.sweep(models.base, models.experts, tmp_path / "whole", GRID, "ace", shard_size="1kB")
    for path in (tmp_path / "whole").rglob("*.safetensors"):
        assert path.read_bytes() == (output / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a_folder_of_another_merge_is_not_taken_for_done(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "grid"
    acemerge.sweep(models.base, models.experts, output, ALPHAS)
    with pytest.raises(InputError, match=r"alpha=0\.5: already exists"):
        acemerge.sweep(models.base, models.experts, output, ALPHAS, ridge=0.1)
    acemerge.sweep(models.base, models.experts, output, ALPHAS, ridge=0.1, overwrite=True)
    assert json.loads((output / "alpha=0.5" / "acemerge_manifest.json").read_text())["options"]["ridge"] == 0.1


def test_points_of_another_sweep_are_not_mixed_with_these(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "grid"
    acemerge.sweep(models.base, models.experts, output, {"keep": [0.1, 0.2]}, "ties")
    before = (output / TABLE).read_bytes()
    for method, experts, options, reason in (
        ("linear", models.experts, {}, "method ties, not linear"),
        ("ties", models.experts[:2], {}, "other models"),
        ("ties", models.experts, {"scope": "tensor"}, r"options {}, not {'scope': 'tensor'}"),
    ):
        with pytest.raises(InputError, match=f"holds keep=0.1 of a sweep with {reason}"):
            acemerge.sweep(models.base, experts, output, {"alpha": [0.5]}, method, options=options)
    assert (output / TABLE).read_bytes() == before
    acemerge.sweep(models.base, models.experts, output, {"keep": [0.3]}, "ties")
    weighted = {"weights": (1.0, 2.0, 3.0)}
    for alphas in ([0.5], [1.0]):
        acemerge.sweep(models.base, models.experts, tmp_path / "weighted", {"alpha": alphas}, "linear", options=weighted)
    assert sorted(json.loads((output / TABLE).read_text())["points"]) == ["keep=0.1", "keep=0.2", "keep=0.3"]


def test_a_best_that_is_beaten_later_does_not_stay(models: Models, tmp_path: Path) -> None:
    def score(folder: Path, settings: Mapping[str, Any]) -> float:
        return float(settings["alpha"])

    output = tmp_path / "grid"
    acemerge.sweep(models.base, models.experts, output, {"alpha": [0.5, 1.0]}, evaluate=score)
    assert names_in(output) == ["alpha=1.0", TABLE]
    acemerge.sweep(models.base, models.experts, output, {"alpha": [0.5, 1.0, 1.5]}, evaluate=score)
    assert names_in(output) == ["alpha=1.5", TABLE]
    result = acemerge.sweep(models.base, models.experts, output, {"alpha": [0.5, 1.0, 1.5]}, evaluate=score, minimise="score")
    assert names_in(output) == ["alpha=0.5", TABLE]
    assert result.best is not None
    assert result.best.folder == output / "alpha=0.5"


def test_a_folder_that_is_no_sweeps(models: Models, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("private")
    with pytest.raises(InputError, match="is no sweep's folder"):
        acemerge.sweep(models.base, models.experts, tmp_path / "mine", ALPHAS)
    with pytest.raises(InputError, match="that is read"):
        acemerge.sweep(models.base, models.experts, models.base / "grid", ALPHAS)
    assert names_in(tmp_path / "mine") == ["diary.txt"]


def test_two_sweeps_at_once(models: Models, tmp_path: Path) -> None:
    def again(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        with pytest.raises(InputError, match="another acemerge process is writing it"):
            acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS)
        return {"score": 1.0}

    acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"alpha": [1.0]}, evaluate=again)
