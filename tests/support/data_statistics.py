"""What methods that use data find measured, made up, for tests of their kernels; and rows for tiny models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from acemerge.methods import Context, Method


@dataclass(frozen=True)
class MadeUp:
    """By expert and tensor: random, but the same whenever it is asked for."""

    shape: tuple[int, ...]
    kind: str

    def _random(self, expert: str, tensor: str, *shape: int) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(f"{expert}/{tensor}".encode()).digest()[:4], "little")
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def of(self, expert: str, tensor: str) -> Tensor:
        if self.kind == "gram":
            n = self.shape[-1]
            x = self._random(expert, tensor, 3 * n, n)
            return x.T @ x / len(x)
        return self._random(expert, tensor, *self.shape).square()

    def scale(self, expert: str) -> float:
        return 1.0

    def coefficient(self, expert: str, tensor: str) -> float:
        return float(self._random(expert, tensor, 1).sigmoid())

    def gates(self, task: str, tensor: str, experts: Sequence[str]) -> list[float]:
        return [float(self._random(f"{task}/{expert}", tensor, 1)) for expert in experts]

    def of_task_vectors(self, task_vectors: Tensor, context: Context) -> Tensor:
        return task_vectors


KINDS = {"regmean": "gram", "regmean_plusplus": "gram", "fisher": "information", "adamerging": "coefficient", "mingle": "gates"}


def made_up_statistics(method: Method, task_vectors: Tensor) -> MadeUp | None:
    """For a method that uses data, something that its measurement could have found; nothing for others."""
    return MadeUp(tuple(task_vectors.shape[1:]), KINDS[method.name]) if method.uses == "data" else None


def write_rows(folder: Path, experts: Iterable[str], *, pixels: bool = False, rows: int = 12, padded: bool = True) -> Path:
    """Ready inputs for the tiny models of `model_zoo`, different ones for every expert."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(experts):
        generator = torch.Generator().manual_seed(100 + seed)
        if pixels:
            tensors = {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}
        else:
            ids = torch.randint(3, 40, (rows, 7), generator=generator)
            mask = torch.ones_like(ids)
            if padded:
                mask[::3, 4:] = 0
                ids[mask == 0] = 0
            tensors = {"input_ids": ids, "attention_mask": mask}
        save_file({**tensors, "labels": torch.zeros(rows, dtype=torch.long)}, folder / f"{name}.safetensors")
    return folder
