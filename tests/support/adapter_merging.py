"""Adapters merged end to end, and how the result is compared with that of the expanded adapters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch

import acemerge
import lora_zoo
from acemerge.execute.pipeline import MergeResult
from acemerge.methods import Method, all_methods
from lora_zoo import Zoo
from model_zoo import Tensors, read_tensors

Dense = Callable[[str], Path]  # the model that a method makes of the Llama's adapters
METHODS = [m for m in all_methods() if m.uses == "weights"]  # the others run models, which an adapter is not: they refuse it


def merge(zoo: Zoo, output: Path, method: str = "ace", experts: Mapping[str, Path] | None = None, **settings: Any) -> MergeResult:
    """The adapters change so much that, as whole models, they look like no fine-tunes."""
    return acemerge.merge(zoo.base, dict(experts or zoo.adapters), output, method, **{"force": True, **settings})


def taken(method: Method, experts: Mapping[str, Path]) -> dict[str, Path]:
    """As many experts as the method takes."""
    return dict(list(experts.items())[: method.experts])


def assert_same_changes(found: Tensors, expected: Tensors, base: Tensors, tolerance: float = 1e-5) -> None:
    """Every tensor changed alike, up to a share of the change and what float32 rounds."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        change = (value - base[name]).double()
        rounding = 8 * torch.finfo(torch.float32).eps * float(value.abs().max())
        error = (found[name].double() - value.double()).abs().max()
        assert error <= tolerance * change.abs().max() + rounding, f"{name}: {error:.2e} of {change.abs().max():.2e}"


def assert_something_changed(found: Tensors, base: Tensors) -> None:
    assert any(not found[name].equal(base[name]) for name in base)


def check_against_expanded(zoo: Zoo, method: Method, tmp_path: Path) -> MergeResult:
    result = merge(zoo, tmp_path / "out", method.name, taken(method, zoo.adapters))
    # Shares and norms over a whole model are counted over what adapters change: so must those of the expanded ones be.
    rules = [{"match": tensor.name, "do": "keep"} for tensor in result.plan.tensors if not tensor.method]
    merge(zoo, tmp_path / "expanded", method.name, taken(method, zoo.full), tensors=rules)
    base, found = read_tensors(zoo.base), read_tensors(tmp_path / "out")
    assert_same_changes(found, read_tensors(tmp_path / "expanded"), base)
    assert method.per_task or any(not found[name].equal(base[name]) for name in base)
    return result


def loaded(zoo: Zoo, adapter: Path) -> Tensors:
    """The model that peft makes of base and adapter, as it is stored; a warning is an error."""
    folder = adapter.parent / f"{adapter.name}-loaded"
    model = lora_zoo.load(zoo.base, zoo.class_name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = peft.PeftModel.from_pretrained(model, str(adapter))
    assert not [str(w.message) for w in caught if "Missing" in str(w.message) or "adapter" in str(w.message)]
    with lora_zoo.quiet():
        wrapped.merge_and_unload().save_pretrained(folder)
    return read_tensors(folder)
