"""A merge as one PEFT adapter: in which form each tensor is written, and what an adapter cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from acemerge.adapters.adapter import Adapter
from acemerge.adapters.change import LoraChange
from acemerge.checkpoints.folder import Checkpoint
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, is_computed
from acemerge.recipe.recipe import Recipe


def plan_as_adapter(
    tensors: Sequence[PlannedTensor], experts: Sequence[Checkpoint], recipe: Recipe
) -> tuple[list[PlannedTensor], list[str]]:
    """The same plan with the form in which each tensor is written, and what an adapter cannot hold."""
    full = [expert.where for expert in experts if not isinstance(expert, Adapter)]
    if full:
        return list(tensors), [f"--as adapter: {full[0]} is a full model, not an adapter; leave out --as adapter, or that expert"]
    planned = [_in_its_form(t, experts, recipe) if is_computed(t) else replace(t, form="absent") for t in tensors]
    saved = {module_of(t.name) for t in planned if t.form == "value"}
    # peft loads a saved module whole, so what is left to the base is written too.
    planned = [replace(t, form="value") if t.form == "absent" and module_of(t.name) in saved else t for t in planned]
    return planned, [*_nothing_low_rank(planned), *_too_full(planned), *_in_two_forms(planned, saved)]


def _in_its_form(tensor: ComputedTensor, experts: Sequence[Checkpoint], recipe: Recipe) -> PlannedTensor:
    changes = [(experts[s.expert].changes or {}).get(s.name) for s in tensor.fate.experts if s.name]
    if not all(isinstance(change, LoraChange) for change in changes):
        return replace(tensor, form="value")
    rows = tensor.header.shape[0]
    core = tensor.fate.core
    largest = min(rows, tensor.header.elements // rows, core.rank if core else tensor.header.elements)
    rank = min(largest, recipe.rank) if recipe.rank else largest if core else 0
    return replace(tensor, form="factors", factors_rank=rank, output_dtype=recipe.dtype or "float32")


def _nothing_low_rank(planned: Iterable[PlannedTensor]) -> list[str]:
    if any(tensor.form == "factors" for tensor in planned):
        return []
    return ["--as adapter: no expert changes a matrix that merges by low-rank factors; leave out --as adapter"]


def _too_full(planned: Iterable[PlannedTensor]) -> list[str]:
    """Without a low-rank core the merged change has no small rank of its own."""
    full = [tensor for tensor in planned if tensor.form == "factors" and not tensor.factors_rank]
    if not full:
        return []
    return [
        f"--as adapter: {len(full)} tensors, such as '{full[0].name}', are merged as whole matrices ({full[0].method}, or DoRA "
        "adapters), so their change has no small rank; give --rank R to write the nearest of rank R, or leave out --as adapter"
    ]


def _in_two_forms(planned: Sequence[PlannedTensor], saved: set[str]) -> list[str]:
    low_rank = {module_of(tensor.name) for tensor in planned if tensor.form == "factors"}
    both = sorted(low_rank & saved)
    if not both:
        return []
    return [
        f"--as adapter: {len(both)} modules, such as '{both[0]}', change by low-rank factors and by a bias or whole weight of "
        "their own, which one adapter cannot hold; leave out --as adapter, or add a recipe rule {match: '*bias', do: keep}"
    ]


def module_of(name: str) -> str:
    """The module that a tensor belongs to."""
    return name.rpartition(".")[0]
