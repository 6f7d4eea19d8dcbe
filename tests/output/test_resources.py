"""Space and memory that a merge needs are counted before any work."""

import shutil
from pathlib import Path

import pytest
import torch

import acemerge
from acemerge.errors import InputError
from acemerge.output import resources
from acemerge.output.resources import check_memory, check_space, needed_space
from interruption import interrupt
from small_models import Models, write_model


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


def test_space_that_an_interrupted_run_has_taken_counts(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(models, tmp_path / "out", monkeypatch)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    written = sum(path.stat().st_size for path in (tmp_path / "out.partial").iterdir())
    assert check_space(tmp_path / "out", written) is None
    assert "make room" in (check_space(tmp_path / "out", written + 1) or "")
