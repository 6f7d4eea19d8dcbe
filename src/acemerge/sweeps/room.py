"""Whether a sweep fits: its models on the disk, its largest tensor in memory; and how many models at a time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from acemerge.methods import get_method
from acemerge.methods.shared_routes import find_route
from acemerge.output.resources import FORCE, check_memory, needed_space
from acemerge.output.staging import partial_folder
from acemerge.planning.estimates import peak_memory
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor, core_shape, is_computed
from acemerge.recipe.sizes import human_bytes

_MOST_AT_ONCE = 100  # models written side by side: each has a file open


def check_room(output: Path, names: Sequence[str], plans: Sequence[Plan], device: str) -> list[str]:
    """A problem report for each of disk and memory that cannot hold all these models at once."""
    needed, free = sum(map(needed_space, plans)), _free(output, names)
    problems = []
    if needed > free:
        problems.append(
            f"output {output}: {_count(plans)} need {human_bytes(needed)}, the disk has {human_bytes(free)} free; give "
            f"--evaluate COMMAND, which writes a few at a time and keeps the best, or fewer values, or another disk, {FORCE}"
        )
    return problems + _memory_problems(plans, device)


def check_room_for_some(output: Path, plans: Sequence[Plan], device: str, at_once: int | None) -> list[str]:
    """The same where models are removed once they are evaluated: so many at a time, and the best so far."""
    one = max(map(needed_space, plans), default=0)
    needed = one * ((at_once or 1) + 1)
    problems = []
    if needed > _free(output):
        problems.append(
            f"output {output}: {at_once or 1} at a time and the best one need {human_bytes(needed)}, the disk has "
            f"{human_bytes(_free(output))} free; make room, use another disk, {FORCE}"
        )
    return problems + _memory_problems(plans, device)


def fitting_at_once(output: Path, plans: Sequence[Plan]) -> int:
    """How many models a group may have: as many as fit in half of the free disk, beside the best so far."""
    one = max(map(needed_space, plans), default=1)
    return max(1, min(_MOST_AT_ONCE, _free(output) // 2 // one - 1))


def groups(count: int, size: int) -> list[range]:
    """Numbers up to count, in groups of about equal size.

    >>> groups(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    size = min(size, _MOST_AT_ONCE)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _free(output: Path, names: Sequence[str] = ()) -> int:
    """What the disk has; what an interrupted sweep has already written of these models counts as there."""
    existing = next(p for p in (output.resolve(), *output.resolve().parents) if p.exists())
    partial = [path for name in names for path in partial_folder(output / name).rglob("*") if path.is_file()]
    return shutil.disk_usage(existing).free + sum(path.stat().st_size for path in partial)


def _count(plans: Sequence[Plan]) -> str:
    return "1 model" if len(plans) == 1 else f"{len(plans)} models"


def _memory_problems(plans: Sequence[Plan], device: str) -> list[str]:
    if device != "cpu" or not plans:
        return []
    problem = check_memory(max(plans[0].peak_memory, *map(_peak_memory, plans[0].tensors)))
    return [problem] if problem else []


def _peak_memory(tensor: PlannedTensor) -> int:
    """With what the method's shared route holds besides."""
    route = find_route(tensor.fate.method) if is_computed(tensor) else None
    if route is None or not is_computed(tensor):
        return peak_memory(tensor)
    shape = core_shape(tensor)
    more = route.float64_elements(*shape) - get_method(tensor.fate.method).float64_elements(*shape)
    return peak_memory(tensor) + int(8 * max(0.0, more))
