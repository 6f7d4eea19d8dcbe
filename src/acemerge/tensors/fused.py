"""A fused matrix, such as q, k and v in one: its matrices are merged apart and joined again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from acemerge.planning.view import View
from acemerge.tensors.results import MergedTensor, TensorFact, norms


def join(view: View, blocks: Sequence[MergedTensor]) -> MergedTensor:
    """One tensor, from what came out for each of its matrices."""
    value = view.together([block.value for block in blocks])
    told = {
        f"{name} of block {number}": fact
        for number, block in enumerate(blocks)
        for name, fact in block.facts.items()
        if name not in ("task_norms", "norm", "largest_task_norm", "norm_ratio")
    }
    warnings = dict.fromkeys(warning for block in blocks for warning in block.warnings)
    return MergedTensor(value, {**told, **_joined_norms(blocks)}, tuple(warnings))


def _joined_norms(blocks: Sequence[MergedTensor]) -> dict[str, TensorFact]:
    """Lengths of the whole; a matrix that nobody changed tells none and adds none."""
    by_block = [block.facts["task_norms"] for block in blocks if "task_norms" in block.facts]
    lengths = [math.hypot(*own) for own in zip(*(own for own in by_block if isinstance(own, list)), strict=True)]
    if not lengths:
        return {"active_experts": 0}
    merged = [norm for block in blocks if isinstance(norm := block.facts.get("norm"), float)]
    return {"task_norms": lengths, **norms([length**2 for length in lengths], math.fsum(norm**2 for norm in merged))}
