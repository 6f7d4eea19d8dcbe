"""Tiny hand-made checkpoints: a base and experts with a few tensors of every kind, no transformers needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


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
