"""Hashes that are begun ahead are those of the files as they are; of what has changed nothing is known ahead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from acemerge.checkpoints import hashed_ahead as ahead
from acemerge.checkpoints.content_hash import file_hash
from acemerge.checkpoints.hashed_ahead import hashed_ahead, hashing_ahead
from acemerge.output import input_hashes
from acemerge.output.manifest import read_merge
from command import Command
from small_models import Models, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def test_what_is_found_is_the_hash(models: Models) -> None:
    with hashing_ahead([models.base]):
        assert hashed_ahead(weights(models.base)) == file_hash(weights(models.base))
        assert hashed_ahead(weights(models.experts[0])) is None
    assert hashed_ahead(weights(models.base)) is None


def test_a_file_that_has_changed_since(models: Models) -> None:
    with hashing_ahead([models.base]):
        weights(models.base).write_bytes(b"something else")
        assert hashed_ahead(weights(models.base)) is None


def test_one_whose_turn_has_not_come_is_left_to_whoever_asks(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that several threads share the work; and the first, which is stopped, keeps nobody waiting."""

    def endless(_file: Path, stopped: object) -> str:
        assert callable(stopped)
        while not stopped():
            pass
        return "never asked for"

    monkeypatch.setattr(ahead, "file_hash", endless)
    with hashing_ahead([models.base, *models.experts]):
        assert hashed_ahead(weights(models.experts[-1])) is None


def test_what_is_no_model_is_nobodys_error(models: Models, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with hashing_ahead([tmp_path / "none", tmp_path / "empty", models.base]):
        assert hashed_ahead(weights(models.base))


def test_a_merge_hashes_each_file_once(run: Command, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does it; and the manifest has what was found."""
    hashed: list[Path] = []

    def counting(file: Path, *rest: Any, **options: Any) -> str:
        hashed.append(file)
        return file_hash(file, *rest, **options)

    for module in (ahead, input_hashes):
        monkeypatch.setattr(module, "file_hash", counting)
    assert run("merge", *models.arguments, "-o", tmp_path / "out", "-m", "linear")[0] == 0
    files = [weights(folder) for folder in (models.base, *models.experts)]
    assert sorted(hashed) == sorted(files)
    told = read_merge(tmp_path / "out").inputs
    assert told == {file.parent.name: {file.name: file_hash(file)} for file in files}


def test_it_needs_no_torch() -> None:
    code = "import acemerge.checkpoints.hashed_ahead, acemerge.cli.merge, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
