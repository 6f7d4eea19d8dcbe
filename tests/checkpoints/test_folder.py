"""Checkpoints in every form they have on disk: shards, torch.save files, wrappers and prefixes, all merge to the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import acemerge
from checkpoint_files import (
    INDEX,
    convert,
    merge,
    merged_tensors,
    to_bin,
    to_file,
    to_legacy_bin,
    to_sharded_bin,
    to_shards,
    to_transposed_bin,
    to_unindexed_shards,
)
from model_zoo import Models, Tensors, assert_equal_tensors, file_hashes, load_whole, swap_prefix


@pytest.mark.parametrize("change", [to_shards, to_unindexed_shards])
def test_sharded_inputs_give_the_same_as_single_files(
    plain: Models, plain_merge: Tensors, tmp_path: Path, change: Callable[[Path, Path], Path]
) -> None:
    sharded = convert(plain, tmp_path, change)
    assert_equal_tensors(merged_tensors(sharded, tmp_path), plain_merge)
    assert not (tmp_path / "out" / INDEX).exists()


def test_shards_and_single_files_mix(plain: Models, plain_merge: Tensors, tmp_path: Path) -> None:
    mixed = Models(
        to_shards(plain.base, tmp_path / "base"), {**plain.experts, "red": to_shards(plain.experts["red"], tmp_path / "red")}
    )
    assert_equal_tensors(merged_tensors(mixed, tmp_path), plain_merge)


@pytest.mark.parametrize("change", [to_bin, to_sharded_bin, to_legacy_bin, to_transposed_bin])
def test_bin_folders_give_the_same_as_safetensors(
    plain: Models, plain_merge: Tensors, tmp_path: Path, change: Callable[[Path, Path], Path]
) -> None:
    assert_equal_tensors(merged_tensors(convert(plain, tmp_path, change), tmp_path), plain_merge)


def test_a_bin_base_is_published_as_safetensors_only(bert: Models, tmp_path: Path) -> None:
    merge(convert(bert, tmp_path, to_sharded_bin), tmp_path / "out")
    assert not [file for file in file_hashes(tmp_path / "out") if ".bin" in file]
    load_whole("BertForMaskedLM", tmp_path / "out")


WRAPPERS: dict[str, Callable[[Tensors], Any]] = {
    "plain": lambda tensors: tensors,
    "state_dict": lambda tensors: {"state_dict": tensors, "epoch": 3},
    "model": lambda tensors: {"model": tensors, "optimizer": {"state": {0: torch.zeros(2)}}},
    "model_state_dict": lambda tensors: {"model_state_dict": tensors},
    "two_deep": lambda tensors: {"model": {"state_dict": tensors}},
}


@pytest.mark.parametrize(
    ("wrapper", "suffix"), [*((wrapper, ".pt") for wrapper in WRAPPERS), ("model", ".pth"), ("model", ".bin")]
)
def test_bare_files_give_the_same_as_folders(
    plain: Models, plain_merge: Tensors, tmp_path: Path, wrapper: str, suffix: str
) -> None:
    files = convert(plain, tmp_path / "in", to_file(WRAPPERS[wrapper], suffix))
    assert_equal_tensors(merged_tensors(files, tmp_path), plain_merge)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_experts_may_carry_the_prefix_of_data_parallel_training(
    plain: Models, plain_merge: Tensors, tmp_path: Path, wrapper: str
) -> None:
    add_module = swap_prefix("", "module.")
    files = convert(plain, tmp_path / "in", to_file(lambda tensors: WRAPPERS[wrapper](add_module(tensors))))
    assert_equal_tensors(merged_tensors(Models(plain.base, files.experts), tmp_path), plain_merge)


def test_a_file_without_a_folder_is_named_by_its_stem(plain: Models, tmp_path: Path) -> None:
    files = convert(plain, tmp_path / "in", to_file(WRAPPERS["plain"]))
    acemerge.merge(files.base, list(files.experts.values()), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "acemerge_manifest.json").read_text())
    assert (manifest["base"], manifest["experts"]) == ("base", ["red", "green", "blue"])


class Trap:
    """Unpickling this creates a file: code that must never run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("role", ["base", "red"])
def test_a_pickled_module_is_refused_with_a_way_out(plain: Models, tmp_path: Path, role: str) -> None:
    module = tmp_path / "whole.pt"
    torch.save(nn.Linear(2, 2), module)
    models = Models(module, plain.experts) if role == "base" else Models(plain.base, {**plain.experts, role: module})
    before = file_hashes(tmp_path)
    with pytest.raises(acemerge.InputError, match=r"whole\.pt: cannot be loaded safely .*safetensors\.torch\.save_file"):
        merge(models, tmp_path / "out")
    assert file_hashes(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["whole.pt"]


def test_code_in_a_pickle_is_not_run(plain: Models, tmp_path: Path) -> None:
    torch.save({"state_dict": {"embed.weight": Trap(tmp_path / "ran")}}, tmp_path / "trap.pt")
    with pytest.raises(acemerge.InputError, match=r"trap\.pt: cannot be loaded safely"):
        merge(Models(plain.base, {"trap": tmp_path / "trap.pt"}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["trap.pt"]


def test_a_file_without_tensors_is_refused(plain: Models, tmp_path: Path) -> None:
    torch.save({"state_dict": {"epoch": 3}}, tmp_path / "empty.pt")
    with pytest.raises(acemerge.InputError, match=r"empty\.pt: holds no state dict of tensors"):
        merge(Models(plain.base, {"empty": tmp_path / "empty.pt"}), tmp_path / "out")
