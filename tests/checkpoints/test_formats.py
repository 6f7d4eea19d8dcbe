"""Formats of weights files: which one is read, and that a new one is one file."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.checkpoints import formats as package
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.formats.registry import formats, open_file, weight_suffixes
from small_models import base_tensors, write_models


def test_the_formats_and_which_is_preferred() -> None:
    assert [each.model_file for each in formats()] == ["model.safetensors", "model.gguf", "pytorch_model.bin"]
    assert weight_suffixes() == (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def test_of_two_formats_the_preferred_one_is_read(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1)}, tmp_path / "one.pt")
    save_file({"x": torch.ones(1)}, tmp_path / "two.safetensors")
    assert open_checkpoint(tmp_path, "both").files == (tmp_path / "two.safetensors",)


def test_a_file_that_travels_is_opened_again(tmp_path: Path) -> None:
    torch.save(base_tensors(), tmp_path / "model.pt")
    there = pickle.loads(pickle.dumps(open_file(tmp_path / "model.pt")))
    assert torch.equal(there.read("scale"), torch.tensor(1.5))


OF_NUMPY = """
from pathlib import Path

import numpy as np
import torch

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.formats.registry import Format, WeightsFile
from acemerge.checkpoints.tensor_header import header_of


def _open(path: Path) -> WeightsFile:
    tensors = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    return WeightsFile(FileStamp.of(path), {name: header_of(value) for name, value in tensors.items()}, tensors.__getitem__)


FORMAT = Format((".npz",), "model.npz", _open, rank=50)
"""


@pytest.fixture
def with_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/numpy_archive.py").write_text(OF_NUMPY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "more")])
    importlib.invalidate_caches()
    formats.cache_clear()
    yield
    formats.cache_clear()
    sys.modules.pop(f"{package.__name__}.numpy_archive", None)


@pytest.mark.usefixtures("with_numpy")
def test_a_new_format_is_one_file(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert weight_suffixes() == (".safetensors", ".gguf", ".npz", ".bin", ".pt", ".pth")
    for folder in (models.base, *models.experts):
        arrays: dict[str, Any] = {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}
        np.savez(folder / "model.npz", **arrays)
        (folder / "model.safetensors").unlink()
    acemerge.merge(models.base, models.experts, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert not list((tmp_path / "again").glob("*.npz"))
