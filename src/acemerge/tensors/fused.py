"""What is told of a tensor whose matrices were merged apart: a fused matrix, such as q, k and v in one, or a stack of experts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from acemerge.tensors.results import TensorFact, norms

_MOST_ONE_BY_ONE = 8
_LENGTHS = ("task_norms", "norm", "largest_task_norm", "norm_ratio")

Facts = Mapping[str, TensorFact]


def joined_facts(blocks: Sequence[Facts]) -> dict[str, TensorFact]:
    """Of one tensor, from what is told of each of its matrices: of each, or, of many, in the middle and at the ends."""
    told = [{name: fact for name, fact in facts.items() if name not in _LENGTHS} for facts in blocks]
    joined = _of_each(told) if len(blocks) <= _MOST_ONE_BY_ONE else _of_all(told)
    return {**joined, **_joined_norms(blocks)}


def _of_each(told: Sequence[Facts]) -> dict[str, TensorFact]:
    return {f"{name} of block {number}": fact for number, facts in enumerate(told) for name, fact in facts.items()}


def _of_all(told: Sequence[Facts]) -> dict[str, TensorFact]:
    names = dict.fromkeys(name for facts in told for name in facts)
    summaries = {name: _summary([facts[name] for facts in told if name in facts]) for name in names}
    return {f"{name} of blocks, {what}": fact for name, summary in summaries.items() for what, fact in summary.items()}


def _summary(facts: Sequence[TensorFact]) -> dict[str, TensorFact]:
    numbers = [fact for fact in facts if isinstance(fact, int | float) and not isinstance(fact, bool)]
    if numbers and len(numbers) == len(facts):
        return {"least": min(numbers), "median": median(numbers), "most": max(numbers)}
    return {f"{fact}": count for fact, count in Counter(map(str, facts)).items()}


def _joined_norms(blocks: Sequence[Facts]) -> dict[str, TensorFact]:
    """Lengths of the whole; a matrix that nobody changed tells none and adds none."""
    by_block = [facts["task_norms"] for facts in blocks if "task_norms" in facts]
    lengths = [math.hypot(*own) for own in zip(*(own for own in by_block if isinstance(own, list)), strict=True)]
    if not lengths:
        return {"active_experts": 0}
    merged = [norm for facts in blocks if isinstance(norm := facts.get("norm"), float)]
    return {"task_norms": lengths, **norms([length**2 for length in lengths], math.fsum(norm**2 for norm in merged))}
