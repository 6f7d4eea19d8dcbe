"""A merge as one PEFT adapter: in which form each tensor is written, and what an adapter cannot hold.

What adapters change by factors is written as factors, and what they saved whole is saved whole. Of full fine-tunes, the matrices
of linear layers are written as factors of a rank that must be asked for. The rest that they change, such as norms and embeddings,
is saved whole on request, and otherwise left out and accounted for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from acemerge.adapters.change import LoraChange
from acemerge.checkpoints.families import FAMILIES, NOT_LINEAR, Family, matches
from acemerge.checkpoints.folder import Checkpoint
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, is_computed
from acemerge.recipe.recipe import Recipe

# Whose modules hold the matrices of all of a layer's experts in one, whatever the file does.
_STACKED = ("*.experts.*",)


def plan_as_adapter(
    tensors: Sequence[PlannedTensor], experts: Sequence[Checkpoint], family: Family, recipe: Recipe
) -> tuple[list[PlannedTensor], list[str]]:
    """The same plan with the form in which each tensor is written, and what an adapter cannot hold."""
    planned = [_in_its_form(t, experts, family, recipe) if is_computed(t) else replace(t, form="absent") for t in tensors]
    planned = _without_place(planned)
    low_rank, saved = modules_written(planned, "factors"), modules_written(planned, "value")
    # peft loads a saved module whole, so what is left to the base is written too.
    planned = [replace(t, form="value") if t.form == "absent" and module_of(t.name) in saved - low_rank else t for t in planned]
    problems = [*_nothing_low_rank(planned), *_of_parameters(tensors, experts), *_too_full(planned)]
    return planned, [*problems, *_in_two_forms(planned, recipe)]


def _in_its_form(tensor: ComputedTensor, experts: Sequence[Checkpoint], family: Family, recipe: Recipe) -> PlannedTensor:
    changes = [(experts[s.expert].changes or {}).get(s.name) for s in tensor.fate.experts if s.name]
    whole = [s for s in tensor.fate.experts if experts[s.expert].changes is None]
    if all(isinstance(change, LoraChange) for change in changes) or (whole and is_linear(tensor, family)):
        return _as_factors(tensor, recipe)
    if not whole or (recipe.save_rest and tensor.name.endswith((".weight", ".bias")) and not matches(tensor.name, _STACKED)):
        return replace(tensor, form="value")
    return replace(tensor, form="left out", fate=replace(tensor.fate, in_pieces=False))


def is_linear(tensor: PlannedTensor, family: Family) -> bool:
    """By its name and shape, whether peft knows the module as a linear layer. Lookup tables and output layers do not count."""
    shape = tensor.header.shape
    no_layers = (*NOT_LINEAR, *_STACKED, *family.kept, *family.averaged, *FAMILIES[-1].averaged)
    return len(shape) == 2 and min(shape) > 1 and tensor.name.endswith(".weight") and not matches(tensor.name, no_layers)


def _as_factors(tensor: ComputedTensor, recipe: Recipe) -> PlannedTensor:
    rows = tensor.header.shape[0]
    core = tensor.fate.core
    largest = min(rows, tensor.header.elements // rows, core.rank if core else tensor.header.elements)
    rank = min(largest, recipe.rank) if recipe.rank else largest if core or recipe.energy else 0
    fate = replace(tensor.fate, in_pieces=False)  # the whole change is factored
    return replace(tensor, form="factors", factors_rank=rank, output_dtype=recipe.float_dtype or "float32", fate=fate)


def _without_place(planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """A module that contains one with factors cannot be saved whole: a parameter of its own is left out."""
    low_rank = modules_written(planned, "factors")

    def has_a_place(tensor: PlannedTensor) -> bool:
        inside = f"{module_of(tensor.name)}."
        return not any(module.startswith(inside) for module in low_rank)

    return [t if t.form != "value" or has_a_place(t) else replace(t, form="left out") for t in planned]


def _nothing_low_rank(planned: Iterable[PlannedTensor]) -> list[str]:
    if any(tensor.form == "factors" for tensor in planned):
        return []
    return ["--as adapter: no expert changes a matrix that merges by low-rank factors; leave out --as adapter"]


def _of_parameters(planned: Iterable[PlannedTensor], experts: Sequence[Checkpoint]) -> list[str]:
    """What transformers 5 has as a parameter of a mixture: as modules peft would load it with one rank for all, if at all."""
    for tensor in planned:
        for source in tensor.experts:
            change = (experts[source.expert].changes or {}).get(source.name or "")
            if isinstance(change, LoraChange) and change.of_parameter:
                return [
                    f"--as adapter: expert {experts[source.expert].where} changes '{tensor.name}' as a parameter "
                    "(target_parameters), for which an adapter of modules has no place; leave out --as adapter"
                ]
    return []


def _too_full(planned: Iterable[PlannedTensor]) -> list[str]:
    """Without a low-rank core the merged change has no small rank of its own."""
    full = [tensor for tensor in planned if tensor.form == "factors" and not tensor.factors_rank]
    if not full:
        return []
    return [
        f"--as adapter: {len(full)} tensors, such as '{full[0].name}', are merged as whole matrices ({full[0].method}, full "
        "models or DoRA adapters), so their change has no small rank; give --rank R to write the nearest of rank R, or "
        "--energy 0.95 for the rank that keeps so much of it, or leave out --as adapter"
    ]


def _in_two_forms(planned: Sequence[PlannedTensor], recipe: Recipe) -> list[str]:
    """A bias beside factors is written where the rest is asked for; adapters of which some have one are refused without."""
    low_rank = modules_written(planned, "factors")
    beside = [t.name for t in planned if t.form == "value" and module_of(t.name) in low_rank]
    refused = sorted({module_of(name) for name in beside if not (recipe.save_rest and name.endswith(".bias"))})
    if not refused:
        return []
    return [
        f"--as adapter: {len(refused)} modules, such as '{refused[0]}', change by low-rank factors and by a bias or whole weight "
        "of their own, which one adapter cannot hold; leave out --as adapter, or add a recipe rule {match: '*bias', do: keep}"
    ]


def modules_written(planned: Iterable[PlannedTensor], form: str) -> set[str]:
    """The modules with a tensor that is written in this form."""
    return {module_of(tensor.name) for tensor in planned if tensor.form == form}


def module_of(name: str) -> str:
    """The module that a tensor belongs to."""
    return name.rpartition(".")[0]
