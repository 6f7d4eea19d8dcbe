"""Peak memory of a merge against the promise: import footprint + (T + 6) x the largest tensor in float32.

    python benchmarks/memory.py                       # 8 experts of a deep GPT-2's shapes, 1 GB each: needs 11 GB of disk
    python benchmarks/memory.py --layers 2 --width 256 --vocabulary 8000

The largest tensor is the vocabulary, which the gpt2 preset merges like every other matrix. Anonymous memory is what counts:
the inputs are memory-mapped, and their pages belong to the page cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from footprint import watch
from shapes import asked_for


@dataclass(frozen=True)
class Shapes:
    """A GPT-2 of any size."""

    layers: int = 66
    width: int = 512
    vocabulary: int = 100_000
    experts: int = 8

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The on-disk names and shapes of its large tensors and a few small ones."""
        d = self.width
        yield "wte.weight", (self.vocabulary, d)
        yield "wpe.weight", (1024, d)
        for i in range(self.layers):
            yield f"h.{i}.ln_1.weight", (d,)
            yield f"h.{i}.attn.c_attn.weight", (d, 3 * d)
            yield f"h.{i}.attn.c_attn.bias", (3 * d,)
            yield f"h.{i}.attn.c_proj.weight", (d, d)
            yield f"h.{i}.mlp.c_fc.weight", (d, 4 * d)
            yield f"h.{i}.mlp.c_proj.weight", (4 * d, d)
        yield "ln_f.weight", (d,)


@dataclass(frozen=True)
class Measurement:
    """What one merge took, in bytes and seconds."""

    experts: int
    model_bytes: int
    largest_tensor_float32: int
    import_footprint: int
    peak_anonymous: int
    seconds: float

    @property
    def units(self) -> float:
        """Peak beyond the footprint, in largest tensors."""
        return (self.peak_anonymous - self.import_footprint) / self.largest_tensor_float32


def make_models(shapes: Shapes, folder: Path) -> None:
    """A base and experts of random weights; the experts' strengths differ, so that both branches of ACE run."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.tensors()}
    for index in range(shapes.experts + 1):
        target = folder / ("base" if index == 0 else f"expert-{index}")
        target.mkdir(parents=True)
        (target / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        strength = 0.0 if index == 0 else 5e-5 * 1.6**index
        model = {n: w + torch.randn(w.shape, generator=generator) * strength for n, w in base.items()}
        save_file(model, target / "model.safetensors", metadata={"format": "pt"})


# Runs in the measured process: everything imported and warmed up by a merge of nothing much, then the footprint, then the merge.
_CHILD = """
import sys, torch, acemerge
from acemerge.execute.pipeline import run_merge
acemerge.merge_task_vectors(torch.randn(2, 64, 64))
print("ready", flush=True); sys.stdin.readline()
folder, experts = sys.argv[1], int(sys.argv[2])
acemerge.merge(f"{folder}/base", [f"{folder}/expert-{i}" for i in range(1, experts + 1)], f"{folder}/merged", quiet=False)
print("done", flush=True); sys.stdin.readline()
"""


def measure(shapes: Shapes, folder: Path) -> Measurement:
    """Merge the models of `folder` in a process of its own, sampling its memory."""
    found = watch(_CHILD, str(folder), str(shapes.experts))
    sizes = [_elements(shape) for _, shape in shapes.tensors()]
    return Measurement(shapes.experts, sum(sizes) * 4, max(sizes) * 4, found.before, found.peak, found.seconds)


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def main() -> None:
    """Make, merge, report."""
    with asked_for(__doc__, Shapes()) as (shapes, folder):
        make_models(shapes, folder)
        result = measure(shapes, folder)
    print(f"{result.experts} experts of {result.model_bytes / 1e9:.2f} GB each, merged in {result.seconds:.0f} s")
    print(f"largest tensor        {result.largest_tensor_float32 / 1e6:8.0f} MB in float32")
    print(f"import footprint      {result.import_footprint / 1e6:8.0f} MB")
    print(f"peak anonymous memory {result.peak_anonymous / 1e6:8.0f} MB = footprint + {result.units:.2f} x largest tensor")
    verdict = "kept" if result.units < shapes.experts + 6 else "BROKEN"
    print(f"promise               footprint + {shapes.experts + 6} x largest tensor: {verdict}")


if __name__ == "__main__":
    main()
