"""Models written anew in every form that checkpoints have on disk, and merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import acemerge
from model_zoo import Models, Tensors, read_tensors, write_tensors

INDEX = "model.safetensors.index.json"


def merge(models: Models, output: Path, **options: Any) -> None:
    acemerge.merge(models.base, models.experts, output, **options)


def merged_tensors(models: Models, root: Path, **options: Any) -> Tensors:
    merge(models, root / "out", **options)
    return read_tensors(root / "out")


def convert(models: Models, root: Path, change: Callable[[Path, Path], Path]) -> Models:
    """Every model written anew below `root` by `change(source, target)`, which returns the new path."""
    experts = {name: change(path, root / name) for name, path in models.experts.items()}
    return Models(change(models.base, root / "base"), experts)


def copy_without_weights(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = list(tensors)
    middle = len(names) // 2
    return {name: tensors[name] for name in names[:middle]}, {name: tensors[name] for name in names[middle:]}


def to_shards(source: Path, target: Path) -> Path:
    copy_without_weights(source, target)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(halves(read_tensors(source)), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_tensors(target, tensors, file)
        weight_map |= dict.fromkeys(tensors, file)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return target


def to_unindexed_shards(source: Path, target: Path) -> Path:
    (to_shards(source, target) / INDEX).unlink()
    return target


def to_bin(source: Path, target: Path) -> Path:
    torch.save(read_tensors(source), copy_without_weights(source, target) / "pytorch_model.bin")
    return target


def to_sharded_bin(source: Path, target: Path) -> Path:
    copy_without_weights(source, target)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(halves(read_tensors(source)), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save(tensors, target / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return target


def to_legacy_bin(source: Path, target: Path) -> Path:
    file = copy_without_weights(source, target) / "pytorch_model.bin"
    torch.save(read_tensors(source), file, _use_new_zipfile_serialization=False)
    return target


def to_transposed_bin(source: Path, target: Path) -> Path:
    """Matrices whose memory runs column by column, as after `weight.T`."""
    tensors = {name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor for name, tensor in read_tensors(source).items()}
    torch.save(tensors, copy_without_weights(source, target) / "pytorch_model.bin")
    return target


def to_file(wrap: Callable[[Tensors], Any], suffix: str = ".pt") -> Callable[[Path, Path], Path]:
    def change(source: Path, target: Path) -> Path:
        file = target.with_suffix(suffix)
        file.parent.mkdir(exist_ok=True)
        torch.save(wrap(read_tensors(source)), file)
        return file

    return change
