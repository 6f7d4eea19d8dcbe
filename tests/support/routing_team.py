"""A base, adapters made by peft, centroids of them and an index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import lora_zoo
from acemerge.routing.index import Kernel, write_index

CLASS = "LlamaForCausalLM"
SETTINGS = {
    "math": {"r": 2, "target_modules": "all-linear"},
    "code": {"r": 3, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 5},
    "law": {"r": 2, "target_modules": ["down_proj", "k_proj"], "use_rslora": True},
}


@dataclass(frozen=True)
class Team:
    base: Path
    adapters: dict[str, Path]
    centroids: Path
    index: Path

    @property
    def arguments(self) -> list[str]:
        return ["route", *map(str, self.adapters.values()), "--centroids", str(self.centroids)]


def vectors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(6, generator=generator) for name in SETTINGS}


def build(root: Path) -> Team:
    base = lora_zoo.write_base(root / "base", CLASS)
    adapters = {
        name: lora_zoo.write_adapter(base, root / name, CLASS, seed=seed, **settings)  # type: ignore[arg-type]
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }
    save_file(vectors(), root / "centroids.safetensors")
    kernel = Kernel(beta=0.8, tau=0.01, top=3)
    write_index(list(map(str, adapters.values())), root / "centroids.safetensors", root / "team.route", kernel=kernel)
    return Team(base, adapters, root / "centroids.safetensors", root / "team.route")
