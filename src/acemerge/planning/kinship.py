"""Whether an expert descends from the base, and is not the base itself: what no header shows.

Merging a stranger gives noise; a copy of the base makes the others count for less where they are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from acemerge.adapters.adapter import Adapter
from acemerge.checkpoints.folder import Checkpoint
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor, computed

RELATED = 0.5
"""A fine-tune's matrices have a cosine near 1 with the base's, those of another random start near 0."""
_BEYOND_DOUBT = 0.25
"""Below this an expert is refused. Even one whose change is twice as long as the base itself has 0.45."""
_MATRICES, _ENTRIES = 3, 2**16
_ALIKE, _UNRELATED = 0.5, 0.25
_ENOUGH = 200
"""Entries: directions of fewer are alike by chance."""


def with_kinship(plan: Plan) -> Plan:
    """The plan with what there is to say of experts whose weights are not what a fine-tune's would be."""
    distant = _find_distant(plan)
    strangers = tuple(said for said, cosine in distant if cosine < _BEYOND_DOUBT)
    doubts = tuple(said for said, cosine in distant if cosine >= _BEYOND_DOUBT)
    return replace(plan, strangers=strangers, doubts=(*doubts, *_find_copies(plan), *_find_twins(plan), *_find_swapped(plan)))


def refused_strangers(plan: Plan) -> list[str]:
    """Why this is not merged, unless it is forced: what would come out is noise."""
    return [f"{said}; give the base it was made from, or pass --force to merge it all the same" for said in plan.strangers]


def _find_distant(plan: Plan) -> list[tuple[str, float]]:
    """What to say of the experts that do not look like fine-tunes of this base, by the first entries of a few matrices."""
    found = []
    experts = [] if plan.recipe.slices else plan.experts  # a layer need not be akin to the one whose place it takes
    for index, expert in enumerate(experts):
        pairs = _matrices_of(plan, index)
        chosen = [pairs[i * (len(pairs) - 1) // (_MATRICES - 1)] for i in range(_MATRICES)] if pairs else []
        cosines = [_cosine(plan.base.read(planned.name), expert.read(name)) for planned, name in chosen]
        known = [cosine for cosine in cosines if cosine is not None]
        if known and max(known) < RELATED:
            said = (
                f"expert '{expert.name}' does not look like a fine-tune of this base: its matrices have a cosine of "
                f"{max(known):.2f} with the base's, where a fine-tune's is near 1; merging it gives noise (`acemerge diagnose`)"
            )
            found.append((said, max(known)))
    return found


def _matrices_of(plan: Plan, index: int) -> list[tuple[PlannedTensor, str]]:
    """The matrices that take part and that this expert stores whole, by its own names; of an adapter, the modules it saves."""
    changes = plan.experts[index].changes or {}
    matrices = [tensor for tensor in computed(plan.tensors) if len(tensor.header.shape) == 2]
    own = [(tensor, source) for tensor in matrices for source in tensor.experts if source.expert == index]
    whole = [(tensor, source) for tensor, source in own if source.name not in changes and not source.rows]
    return [(tensor, source.name) for tensor, source in whole if source.name]  # in the base's order


def _cosine(base: Tensor, expert: Tensor) -> float | None:
    one, other = (tensor.reshape(-1)[:_ENTRIES].double() for tensor in (base, expert))
    lengths = float(one.norm() * other.norm())
    return float(torch.dot(one, other)) / lengths if math.isfinite(lengths) and lengths else None


def _find_copies(plan: Plan) -> Iterator[str]:
    """Experts that are the base, weight for weight. Any other is known by the first tensor that differs."""
    for index, expert in enumerate(plan.experts):
        if expert.changes is not None or plan.method.takes_base:
            continue
        own = [(t.name, s.name) for t in computed(plan.tensors) for s in t.fate.experts if s.expert == index and s.name]
        if own and all(_same(plan.base.read(name), expert.read(theirs)) for name, theirs in own):
            yield (
                f"expert '{expert.name}' is a copy of the base, weight for weight: it has nothing to add, and makes the others "
                "count for less where they are averaged; leave it out"
            )


def _find_twins(plan: Plan) -> Iterator[str]:
    """Experts that are each other, weight for weight, as a copied folder is."""
    for one, other in combinations(range(len(plan.experts)), 2):
        first, second = plan.experts[one], plan.experts[other]
        if _settings(first) != _settings(second):
            continue
        names = [{s.expert: s.name for s in tensor.fate.experts} for tensor in computed(plan.tensors)]
        both = [(own.get(one), own.get(other)) for own in names if own.get(one) or own.get(other)]
        if both and all(a and b and _same_stored(first, a, second, b) for a, b in both):
            yield (
                f"experts '{first.name}' and '{second.name}' are the same, weight for weight: what they changed counts twice; "
                "leave one out"
            )


def _find_swapped(plan: Plan) -> Iterator[str]:
    """Experts that may be the base of all, by the first entries of a few matrices."""
    full = [] if plan.recipe.slices else [t for t, expert in enumerate(plan.experts) if expert.changes is None]
    stored = {t: {planned.name: name for planned, name in _matrices_of(plan, t)} for t in full}
    everywhere = [name for name in stored[full[0]] if all(name in own for own in stored.values())] if len(full) > 1 else []
    if not everywhere:
        return
    chosen = [everywhere[i * (len(everywhere) - 1) // (_MATRICES - 1)] for i in range(_MATRICES)]
    base = _first_entries(plan.base, chosen)
    if len(base) < _ENOUGH:
        return
    changes = torch.stack([_first_entries(plan.experts[t], [stored[t][name] for name in chosen]) - base for t in full])
    inner = (changes @ changes.T).tolist()
    for place, t in enumerate(full):
        if seems_the_base(inner, place):
            yield f"expert '{plan.experts[t].name}' {SWAPPED}; {IF_SWAPPED}"


def _first_entries(model: Checkpoint, names: Sequence[str]) -> Tensor:
    return torch.cat([model.read(name).reshape(-1)[:_ENTRIES].double() for name in names])


SWAPPED = (
    "looks like the model that the others were made from: seen from the base that was given, it and they changed in the same "
    "direction, and seen from it the others changed in directions of their own"
)
IF_SWAPPED = "if it is the base, give it first"


def seems_the_base(inner: Sequence[Sequence[float]], expert: int) -> bool:
    """Whether the others seem to have been trained from this expert, by the inner products of all changes.

    Fine-tunes that are unrelated have a right angle between them at the model they come from, and half of it at each other.
    """
    own = inner[expert][expert]
    for other in (t for t in range(len(inner)) if t != expert):
        shared, energy = inner[expert][other], inner[other][other]
        apart = own + energy - 2 * shared
        if not (own > 0 and energy > 0 and apart > 0):
            return False
        alike, unrelated = shared / math.sqrt(own * energy), (own - shared) / math.sqrt(own * apart)
        if not (alike > _ALIKE and abs(unrelated) < _UNRELATED):
            return False
    return len(inner) > 1


def _settings(expert: Checkpoint) -> Mapping[str, Any] | None:
    """What the factors of an adapter are multiplied by, among other things."""
    return expert.settings if isinstance(expert, Adapter) else None


def _same_stored(first: Checkpoint, name: str, second: Checkpoint, other_name: str) -> bool:
    """Whether two experts hold the same value of a tensor, or of adapters with the same settings, what its change is made of."""
    values, others = ([tensor for _, tensor in model.stored(own)] for model, own in ((first, name), (second, other_name)))
    return len(values) == len(others) and all(map(_same, values, others))


def _same(one: Tensor, other: Tensor) -> bool:
    """Other weights mostly differ in their first entries: the rest is compared only if these are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first = [tensor.reshape(-1)[:_ENTRIES] for tensor in (one, other)]
    return torch.equal(*first) and torch.equal(one, other)
