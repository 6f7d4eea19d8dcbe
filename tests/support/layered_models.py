"""Models with attention and MLP matrices in every layer."""

from __future__ import annotations

from pathlib import Path

import torch

from small_models import write_model


def layered(folder: Path, layers: int, experts: int, strength: float = 0.02) -> tuple[Path, list[Path]]:
    """A base with attention and MLP matrices in each layer, and independent fine-tunes of it."""
    generator = torch.Generator().manual_seed(0)
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    shapes = [(8, 8), (8, 8), (16, 8), (8, 16)]
    base = {
        f"layers.{layer}.{name}.weight": torch.randn(shape, generator=generator)
        for layer in range(layers)
        for name, shape in zip(names, shapes, strict=True)
    } | {"embed_tokens.weight": torch.randn(20, 8, generator=generator)}
    folders = [write_model(folder / "base", base)]
    for index in range(experts):
        tuned = {name: w + strength * torch.randn(w.shape, generator=generator) for name, w in base.items()}
        folders.append(write_model(folder / f"expert-{index}", tuned))
    return folders[0], folders[1:]
