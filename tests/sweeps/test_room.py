"""Disk and memory that a sweep needs are counted before any work."""

import shutil
from pathlib import Path

import pytest

import acemerge
from acemerge.errors import PreflightError
from acemerge.execute.engines import local
from small_models import Models


def test_a_disk_too_small_for_all_names_the_way_out(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    size = sum(path.stat().st_size for path in models.base.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000 + 5 * size))
    alphas = {"alpha": [0.1 * i for i in range(1, 46)]}
    with pytest.raises(PreflightError, match=r"45 models need .*; give --evaluate COMMAND"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", alphas)
    assert not (tmp_path / "grid").exists()
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", alphas, evaluate=lambda f, s: {"score": s["alpha"]})
    assert result.best is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PreflightError, match="1 at a time and the best one need"):
        acemerge.sweep(models.base, models.experts, tmp_path / "other", alphas, evaluate=lambda f, s: {"score": s["alpha"]})


def test_memory_counts_what_the_shared_route_holds(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(local, "check_memory", asked.append)
    result = acemerge.merge(models.base, models.experts, tmp_path / "one", "ace")
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"epsilon": [1e-5, 1e-3]}, "ace")
    assert asked[0] == result.plan.peak_memory
    assert asked[1] > result.plan.peak_memory
