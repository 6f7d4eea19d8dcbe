"""A tensor's entries come from the file piece by piece, the same as from the mapped file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from acemerge.checkpoints.file_vector import FileVector
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import MergeError
from checkpoint_files import to_bin, to_shards
from small_models import base_tensors, write_model


def vector_of(folder: Path, name: str) -> FileVector:
    vector = open_checkpoint(folder, "model").vector(name)
    assert isinstance(vector, FileVector)
    return vector


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pieces_are_those_of_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where the tensor before it is of odd length, so that none is aligned in the file."""
    value = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"a": torch.zeros(3, dtype=torch.uint8), "b": value, "c": torch.zeros(2)}, tmp_path / "model.safetensors")
    vector = vector_of(tmp_path, "b")
    assert (vector.numel(), vector.dtype) == (77, dtype)
    for where in (slice(0, 77), slice(5, 6), slice(30, 77)):
        assert vector[where].equal(value.reshape(-1)[where])


@pytest.mark.parametrize("shards", [False, True])
def test_every_tensor_of_a_model(tmp_path: Path, shards: bool) -> None:
    folder = write_model(tmp_path / "model", base_tensors())
    folder = to_shards(folder, tmp_path / "shards") if shards else folder
    for name, value in base_tensors().items():
        vector = vector_of(folder, name)
        assert vector[slice(0, vector.numel())].equal(value.reshape(-1))


def test_other_formats_give_the_mapped_tensor(tmp_path: Path) -> None:
    folder = to_bin(write_model(tmp_path / "model", base_tensors()), tmp_path / "bin")
    vector = open_checkpoint(folder, "model").vector("layers.0.weight")
    assert isinstance(vector, torch.Tensor)
    assert vector.equal(base_tensors()["layers.0.weight"].reshape(-1))


@pytest.mark.parametrize("before", [True, False])
def test_a_file_that_shrinks(tmp_path: Path, before: bool) -> None:
    """Told in one sentence, where a mapped file would end the process."""
    path = write_model(tmp_path / "model", base_tensors()) / "model.safetensors"
    checkpoint = open_checkpoint(path, "model")
    vector = checkpoint.vector("layers.0.weight")
    os.truncate(path, 100)
    with pytest.raises(MergeError, match=r"model\.safetensors: was changed \(from \d+ to 100 bytes\)"):
        checkpoint.vector("layers.0.weight") if before else vector[slice(0, vector.numel())]


def test_files_are_closed(tmp_path: Path) -> None:
    vector = vector_of(write_model(tmp_path / "model", base_tensors()), "layers.0.weight")
    descriptor = vector._file
    vector.will_be_needed()
    del vector
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
