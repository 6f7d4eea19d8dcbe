"""What a sweep has in common with a merge: devices, strangers, reports."""

import json
from pathlib import Path

import pytest

import acemerge
from acemerge.errors import PreflightError
from small_models import Models, base_tensors, tree, write_model


def test_a_sweep_on_several_devices_gives_the_bytes_of_one(models: Models, tmp_path: Path) -> None:
    for device, output in (("cpu", "one"), ("cpu,cpu", "two")):
        acemerge.sweep(
            models.base, models.experts, tmp_path / output, {"epsilon": [1e-5, 1e-3]}, "ace", shard_size="1kB", device=device
        )
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_stranger_is_refused_before_anything_is_written(models: Models, tmp_path: Path) -> None:
    models.experts[1] = write_model(tmp_path / "stranger", base_tensors(seed=9))
    with pytest.raises(PreflightError, match=r"'stranger' does not look .* or pass --force to merge it all the same"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"epsilon": [1e-5, 1e-3]}, "ace")
    assert not (tmp_path / "grid").exists()


def test_a_forced_stranger_is_told_and_noted_at_every_point(
    models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models.experts[1] = write_model(tmp_path / "stranger", base_tensors(seed=9))

    def sweep() -> tuple[str, list[int]]:
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"epsilon": [1e-5, 1e-3]}, "ace", at_once=1, force=True)
        return capfd.readouterr().err, [path.stat().st_mtime_ns for path in sorted((tmp_path / "grid").rglob("*.safetensors"))]

    told, written = sweep()
    assert told.count("warning: expert 'stranger' does not look like a fine-tune of this base") == 1
    assert sweep()[1] == written  # everything is there already
    for manifest in (tmp_path / "grid").rglob("acemerge_manifest.json"):
        assert any("'stranger' does not look like" in note for note in json.loads(manifest.read_text())["notes"])


def test_a_sweep_writes_reports_too(models: Models, tmp_path: Path) -> None:
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"epsilon": [1e-5, 1e-3]}, "ace", report=True)
    assert len(list((tmp_path / "grid").rglob("report.html"))) == 2
