"""Whether a finished merge went further than a network takes: what was measured to be worse than averaging (docs/guard.md)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from acemerge.numerics.linalg import sum_of_squares
from acemerge.output.manifest import TensorRecord
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, computed, matrix_shape
from acemerge.recipe.recipe import Recipe

LIMIT = 1.1
"""Of the geometric mean of the base's length and an expert's. Merges beyond it were worse than averaging: docs/guard.md."""
MOVED = 1 / 3
"""How far experts may have moved, of the base's length, for the measured merges to say anything: theirs moved 1 to 32%."""
_MATRICES = 16
"""Looked at, evenly spread over the model: the base's are read for it."""
Item = TypeVar("Item")

_FLAGS = {
    "preset": "--preset",
    "missing": "--missing",
    "heads": "--heads",
    "tokenizer": "--tokenizer",
    "files_from": "--files-from",
    "dtype": "--dtype",
    "save_as": "--as",
    "rank": "--rank",
}
"""Of a recipe's fields that any method has, the flags."""


def with_cautions(plan: Plan, tensors: Sequence[TensorRecord]) -> Plan:
    """The plan with what there is to say of a merge that is likely to be worse than averaging; no path is in it."""
    times = overreach(plan, tensors)
    if times is None or times <= 1:
        return plan
    said = (
        f"the merged change is {times:.1f} times as long as a merge of these models should be: of merges that went so far, "
        "almost all that were measured were worse than averaging (docs/guard.md); compare it with -m average"
    )
    return replace(plan, cautions=(said,))


def averaging_instead(recipe: Recipe, output: Path) -> str:
    """The command that averages the same models to an output of the same kind; of a recipe of several stages, what to change."""
    if not isinstance(recipe.base, str) or any(expert.merge for expert in recipe.experts):
        return "write `method: average` in the outer recipe"
    models = [recipe.base, *(expert.model for expert in recipe.experts)]
    asked = {flag: getattr(recipe, name) for name, flag in _FLAGS.items() if name in recipe.model_fields_set}
    words = [word for flag, value in asked.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["acemerge", "merge", *models, "-o", f"{output}-average", "-m", "average", *words])


def overreach(plan: Plan, tensors: Sequence[TensorRecord]) -> float | None:
    """The middle of what single matrices have; above 1 is too far. None if nothing tells.

    Not measured: layers from other places of the models, one model per task, experts that moved most of the way from the base.
    """
    if plan.recipe.slices or plan.per_task_methods:
        return None
    planned = {tensor.name: tensor for tensor in computed(plan.tensors) if len(tensor.header.shape) > 1}
    told = [record for record in tensors if record.name in planned and record.number("norm") is not None]
    return middle([_of_matrix(plan, planned[record.name], record) for record in evenly_spread(told)])


def evenly_spread(matrices: Sequence[Item]) -> Sequence[Item]:
    """Those that are looked at."""
    return matrices[:: max(1, math.ceil(len(matrices) / _MATRICES))]


def middle(found: Sequence[float | None]) -> float | None:
    """What a whole model has."""
    known = [times for times in found if times is not None]
    return median(known) if known else None


def _of_matrix(plan: Plan, planned: ComputedTensor, record: TensorRecord) -> float | None:
    merged, active = record.number("norm"), [norm for norm in record.numbers("task_norms") if norm > 0]
    if merged is None or not active:
        return None
    expert = math.sqrt(math.fsum(norm**2 for norm in active) / len(active))
    return times_allowed(
        merged, expert, lambda: math.sqrt(sum_of_squares(plan.base.read(planned.name))), share_of_directions(planned)
    )


def times_allowed(merged: float, expert: float, base: Callable[[], float], share: float) -> float | None:
    """|M| over what it may have: LIMIT sqrt(|W0| D) share^(3/4), and never less than D, an expert's own length.

    A change no longer than D is within bounds whatever the base is, so that most methods never read it again.
    """
    if merged <= expert:
        return merged / expert
    length = base()
    if expert > MOVED * length:
        return None
    return merged / max(expert, reach(length, expert, share))


def reach(base: float, expert: float, share: float) -> float:
    """How long a merged change may be, from the lengths of base and expert and the share of directions that experts have."""
    return LIMIT * math.sqrt(base * expert) * math.pow(share, 0.75)


def share_of_directions(planned: ComputedTensor) -> float:
    """Adapters have few of a matrix's, together at most the sum of their ranks; full fine-tunes all."""
    _, rows, columns = matrix_shape(planned)
    return min(1.0, planned.fate.core.rank / min(rows, columns)) if planned.fate.core else 1.0
