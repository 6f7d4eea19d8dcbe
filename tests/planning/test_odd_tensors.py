"""Tensors that are not weights, or hardly: buffers, lone numbers, empty ones, and those that nobody changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import model_zoo as zoo
from checkpoint_files import merged_tensors
from model_zoo import Models, Tensors, bitwise_equal, read_tensors, rewrite, write_tensors


def odd_models(root: Path, odd: Tensors, theirs: Tensors) -> Models:
    """A base with odd tensors, and experts with other values in them."""
    models = zoo.build_from_shapes(root / "in", {"mix.weight": (8, 8)})
    for folder in models.folders:
        write_tensors(folder, {**read_tensors(folder), **(odd if folder == models.base else theirs)})
    return models


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.arange(6)[None], torch.ones(1, 6, dtype=torch.int64)),
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)),
        (torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([3, 4], dtype=torch.uint8)),
        (torch.tensor([True, False, True]), torch.tensor([False, False, True])),
        (torch.ones(6, 6, dtype=torch.bool).tril(), torch.ones(6, 6, dtype=torch.bool)),
        (torch.tensor(7), torch.tensor(9)),
    ],
    ids=["int64", "int32", "uint8", "bool", "bool_matrix", "0-D_int64"],
)
def test_buffers_are_the_bases(tmp_path: Path, ours: Tensor, theirs: Tensor) -> None:
    found = merged_tensors(odd_models(tmp_path, {"odd": ours}, {"odd": theirs}), tmp_path)
    assert bitwise_equal(found["odd"], ours)


def test_buffers_keep_their_dtype_when_another_is_asked_for(tmp_path: Path) -> None:
    odd = {"ids": torch.arange(6), "mask": torch.tensor([True, False])}
    found = merged_tensors(odd_models(tmp_path, odd, odd), tmp_path, dtype="float16")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "ids": torch.int64, "mask": torch.bool, "mix.weight": torch.float16,
    }  # fmt: skip


@pytest.mark.parametrize("method", ["ace", "average"])
def test_a_lone_number_is_averaged(tmp_path: Path, method: str) -> None:
    models = odd_models(tmp_path, {"logit_scale": torch.tensor(2.5)}, {"logit_scale": torch.tensor(3.0)})
    found = merged_tensors(models, tmp_path, method=method)
    assert bitwise_equal(found["logit_scale"], torch.tensor(3.0))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("method", ["ace", "average"])
def test_empty_tensors_pass_through(tmp_path: Path, method: str, shape: tuple[int, ...]) -> None:
    empty = {"a_first": torch.zeros(shape), "z_last": torch.zeros(shape)}
    found = merged_tensors(odd_models(tmp_path, empty, empty), tmp_path, method=method)
    assert [found[name].shape for name in empty] == [shape, shape]


def test_a_tensor_that_nobody_changed_is_the_bases(models_of: Callable[..., Models], tmp_path: Path) -> None:
    plain = models_of(zoo.unknown)
    name = "blocks.0.mix.weight"
    base = read_tensors(plain.base)
    experts = {
        expert: rewrite(path, tmp_path / expert, lambda tensors: {**tensors, name: base[name]})
        for expert, path in plain.experts.items()
    }
    assert bitwise_equal(merged_tensors(Models(plain.base, experts), tmp_path)[name], base[name])
