"""A base and experts on disk, and each task's model as the formulas have it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
from per_task_cases import REFERENCES, Tensors
from small_models import base_tensors, fine_tuned, write_model


@dataclass(frozen=True)
class Models:
    """A base and its experts, in memory and on disk."""

    root: Path
    base: Tensors
    experts: dict[str, Tensors]
    prefix: str = ""
    heads: dict[str, Tensors] = field(default_factory=dict)

    @property
    def folders(self) -> dict[str, Path]:
        return {name: self.root / name for name in self.experts}

    def merge(self, output: str, method: str, **options: Any) -> Path:
        acemerge.merge(self.root / "base", self.folders, self.root / output, method=method, **options)
        return self.root / output

    def weights(self) -> list[str]:
        return [name for name, weight in self.base.items() if weight.is_floating_point()]

    def _task_vectors(self, name: str) -> Tensor:
        """In float32, as the engine takes them, or in float64 if the models are."""
        wide = torch.promote_types(self.base[name].dtype, torch.float32)
        return torch.stack([e[name].to(wide) - self.base[name].to(wide) for e in self.experts.values()])

    def expected(self, method: str, **options: Any) -> dict[str, Tensors]:
        """Each task's model in float64 (integers as they are), under the base's names."""
        taus = {name: self._task_vectors(name).double().numpy() for name in self.weights()}
        return {
            expert: {name: w.double() + torch.from_numpy(change[name]) if name in change else w for name, w in self.base.items()}
            for expert, change in zip(self.experts, REFERENCES[method](taus, **options), strict=True)
        }


def write(
    root: Path,
    *,
    dtype: torch.dtype = torch.float32,
    model_type: str = "nobody-heard-of-it",
    prefix: str = "",
    heads: bool = False,
) -> Models:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "h.0.attn.c_attn.weight": (8, 24),
        "h.0.attn.c_attn.bias": (24,),
        "stem.weight": (6, 3, 2, 2),
        "odd.weight": (7, 11),
    }
    base = {
        "frozen.weight": torch.randn(16, 16, generator=generator),  # nobody changes it
        **base_tensors(),
        **{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    }
    base = {name: w.to(dtype) if w.is_floating_point() else w for name, w in base.items()}
    experts = {f"e{i}": {**fine_tuned(base, i), "frozen.weight": base["frozen.weight"]} for i in range(3)}
    experts = {e: {name: w.to(base[name].dtype) for name, w in own.items()} for e, own in experts.items()}
    own_heads = {e: {"classifier.weight": torch.randn(2 + i, 8, generator=generator)} for i, e in enumerate(experts) if heads}
    write_model(root / "base", base, {"model_type": model_type})
    for i, (name, tensors) in enumerate(experts.items()):
        stored = {prefix + key: value for key, value in tensors.items()} | own_heads.get(name, {})
        write_model(root / name, stored, {"model_type": model_type, "task": i})
    return Models(root, base, experts, prefix, own_heads)


def half_unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of the distance between neighbours of that dtype, at these values."""
    exponent = value.abs().clamp_min(torch.finfo(dtype).tiny).log2().floor()
    return torch.finfo(dtype).eps / 2 * 2**exponent


def assert_is(found: Tensors, expected: Tensors, base: Tensors) -> None:
    """The formula rounded once to the tensor's dtype, but for a share of the change: parts are stored in float32 or float64."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if not value.is_floating_point():
            assert value.equal(expected[name])
            continue
        change = (expected[name] - base[name].double()).abs().max()
        error = (value.double() - expected[name]).abs()
        share = 1e-9 if base[name].dtype == torch.float64 else 1e-5
        allowed = 1.02 * half_unit(expected[name], value.dtype) + share * change
        assert (error <= allowed).all(), f"{name}: off by {(error / allowed).max():.3g} of what is allowed"


def check_tasks(models: Models, output: Path, method: str, **options: Any) -> None:
    """Export every expert's model and compare it with the formula."""
    for expert, expected in models.expected(method, **options).items():
        exported = acemerge.export_expert(output, expert, output.with_name(f"{output.name}-{expert}"))
        found = load_file(exported / "model.safetensors")
        head = models.heads.get(expert, {})
        for name, tensor in head.items():
            assert found.pop(name).equal(tensor)
        assert all(name.startswith(models.prefix) for name in found if head)
        assert_is({name.removeprefix(models.prefix if head else ""): w for name, w in found.items()}, expected, models.base)
        if head:
            assert json.loads((exported / "config.json").read_text())["task"] == int(expert[1:])


def read(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
