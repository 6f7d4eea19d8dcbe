"""The matrices of one block of well-known transformers, and experts for them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """One block of a model: its matrices [out, in], how often each occurs, and how many experts the paper merges."""

    name: str
    tasks: int
    matrices: Mapping[tuple[int, int], int]


def _fused(width: int) -> dict[tuple[int, int], int]:
    """Queries, keys and values in one matrix, as OpenCLIP and GPT-2 have them."""
    return {(3 * width, width): 1, (width, width): 1, (4 * width, width): 1, (width, 4 * width): 1}


BLOCKS = {
    "small": Block("a small model", 3, _fused(128)),
    "vit-b16": Block("ViT-B/16", 8, _fused(768)),
    "vit-l14": Block("ViT-L/14", 8, _fused(1024)),
    "gpt2": Block("GPT-2", 7, _fused(768)),
    "roberta-base": Block("RoBERTa-base", 8, {(768, 768): 4, (3072, 768): 1, (768, 3072): 1}),
}


def make_experts(tasks: int, shape: tuple[int, int]) -> Float[Tensor, "task out in"]:
    """Task vectors with singular values that decay like i^-0.5, of lengths from 0.1 to 0.4, as fine-tuned layers have them."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    rank = min(shape)
    values = torch.arange(1, rank + 1) ** -0.5
    vectors = torch.empty(tasks, rows, columns)
    for t in range(tasks):
        left = torch.randn(rows, rank, generator=generator) * values
        torch.mm(left, torch.randn(rank, columns, generator=generator), out=vectors[t])
        vectors[t] *= (0.1 + 0.3 * t / max(1, tasks - 1)) / float(vectors[t].norm())
    return vectors


def interleaved(routes: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each route, run in turn so that a busy machine is busy for all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(repeats):
        for name, route in routes.items():
            gc.collect()
            started = time.perf_counter()
            route()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(own) for name, own in seconds.items()}


def gemm_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Operations per second of torch's product of square matrices, the best of several: what the machine can do."""
    a = torch.randn(size, size).to(dtype)
    best = min(interleaved({"product": lambda: a @ a}, 1)["product"] for _ in range(4))
    return 2.0 * size**3 / best
