"""Sweeps of tiny models, and how their points are checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from acemerge.execute import shard
from acemerge.planning.tensor import computed
from acemerge.tensors.computing import TensorMerge
from acemerge.tensors.merging import merge_tensor_at_points
from small_models import Models

GRID = {"epsilon": [1e-5, 1e-3], "tau": [0.0, 9.0], "k_frac": [0.1, 0.5]}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_as_merged_alone(folder: Path, alone: Path) -> None:
    """The same files; the same weights up to rounding; the same account but for hashes and last digits."""
    assert names_in(folder) == names_in(alone)
    for path in alone.rglob("*.safetensors"):
        expected, found = load_file(path), load_file(folder / path.relative_to(alone))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
    for name in ("acemerge.yaml", "README.md", "config.json"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
    expected, found = (json.loads((place / "acemerge_manifest.json").read_text()) for place in (alone, folder))
    assert found.keys() == expected.keys()
    for mine, theirs in zip(found["tensors"], expected["tensors"], strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["options"] == theirs["options"] if "options" in theirs else True


def distance_from_base(models: Models) -> Callable[[Path, Mapping[str, Any]], dict[str, float]]:
    base = load_file(models.base / "model.safetensors")

    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        merged = load_file(folder / "model.safetensors")
        return {"length": float((merged["layers.0.weight"] - base["layers.0.weight"]).norm()), "alpha": settings["alpha"]}

    return evaluate


ALPHAS = {"alpha": [0.5, 2.0, 1.0]}


def methods_merged(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """By which methods tensors are merged from now on."""
    seen: set[str] = set()

    def noted(merges: Sequence[TensorMerge], device: torch.device) -> Any:
        seen.update(tensor.fate.method for tensor in computed([merge.planned for merge in merges]))
        return merge_tensor_at_points(merges, device)

    monkeypatch.setattr(shard, "merge_tensor_at_points", noted)
    return seen


def count_merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many points each tensor is merged at from now on."""
    seen: list[int] = []

    def counted(merges: Sequence[TensorMerge], device: torch.device) -> Any:
        seen.append(len(merges))
        return merge_tensor_at_points(merges, device)

    monkeypatch.setattr(shard, "merge_tensor_at_points", counted)
    return seen
