"""Adapters of parameters (`target_parameters`), which mixtures of experts have in place of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from acemerge.adapters.apart import stacks, taken_apart
from acemerge.adapters.change import LoraChange
from acemerge.adapters.module import LoraModule
from acemerge.adapters.settings import CONFIG, EXPAND
from acemerge.adapters.stacked import StackedChange, is_target, take_stacked
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.formats.registry import WeightsFile
from acemerge.checkpoints.untrusted import shortened
from acemerge.errors import InputError


def changes_of_parameters(
    modules: dict[str, LoraModule], settings: Mapping[str, Any], base: Checkpoint, stored: WeightsFile
) -> dict[str, StackedChange | LoraChange]:
    """By names in the base. Modules of stacked experts are taken out of `modules`; one of a matrix stays, under its own name."""
    targets = settings.get("target_parameters")
    if not targets:
        return {}
    config = stored.path.parent / CONFIG
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise InputError(f"{config}: target_parameters must be a list of names; save the adapter again")
    apart = stacks(base.tensors)
    shapes = {name: header.shape for name, header in base.tensors.items() if len(header.shape) == 3}
    shapes |= {name: stack.shape for name, stack in apart.items()}
    changes: dict[str, StackedChange | LoraChange] = {}
    for name, change in take_stacked(modules, shapes, targets, stored.read_unchanged).items():
        changes |= taken_apart(change, apart[name]) if name in apart else {name: change}
    modules |= {name: module.of_parameter(module.weight) for name, module in modules.items() if is_target(module.weight, targets)}
    if _left_over(modules.values(), targets):
        told = shortened(f"target_parameters={targets!r}")
        raise InputError(f"{config}: {told} is not supported for a base that holds no such parameters. {EXPAND}")
    return changes


def _left_over(modules: Iterable[LoraModule], targets: list[str]) -> bool:
    """Whether there is a wrapped parameter that the base stores otherwise."""
    owners = [owner for owner, _, _ in (target.rpartition(".") for target in targets) if owner]
    others = [module.name for module in modules if module.parameter is None]
    return any(name.endswith(".base_layer") or is_target(name, owners) for name in others)
