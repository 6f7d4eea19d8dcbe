"""Tiny hand-made checkpoints: a base and experts with a few tensors of every kind, no transformers needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import acemerge


def base_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(12, 8, generator=generator),
        "layers.0.bias": torch.randn(12, generator=generator),
        "layers.1.weight": torch.randn(6, 12, generator=generator),
        "embed.weight": torch.randn(20, 8, generator=generator),
        "scale": torch.tensor(1.5),
        "steps": torch.tensor(7),
    }


def fine_tuned(base: Mapping[str, Tensor], seed: int, strength: float = 0.05) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: w + strength * torch.randn(w.shape, generator=generator) if w.is_floating_point() else w.clone()
        for name, w in base.items()
    }


def write_model(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody-heard-of-it", **(config or {})}))
    return folder


@dataclass(frozen=True)
class Models:
    base: Path
    experts: list[Path]

    @property
    def arguments(self) -> list[str]:
        return [str(self.base), *map(str, self.experts)]


def write_models(folder: Path, experts: int = 3) -> Models:
    base = base_tensors()
    return Models(
        write_model(folder / "base", base),
        [write_model(folder / f"expert-{i}", fine_tuned(base, i)) for i in range(experts)],
    )


def merge_into_shards(models: Models, output: Path, method: str = "emr", **keywords: Any) -> None:
    """Several shards; emr makes a statistics pass, and writes shared/ and tasks/ besides."""
    acemerge.merge(models.base, models.experts, output, method=method, shard_size="1kB", **keywords)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
