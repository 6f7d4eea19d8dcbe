"""What the plan says is needed, against what the machine has."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil

from acemerge.methods import get_method
from acemerge.methods.shared_routes import find_route
from acemerge.output.staging import partial_folder
from acemerge.planning import estimates
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, apart, core_shape, is_computed
from acemerge.recipe.sizes import human_bytes

FORCE = "or pass --force to try"
_DOCUMENTS, _DOCUMENTS_PER_TENSOR = 20_000, 2_000  # bytes of card, recipe, manifest and index


def needed_space(plan: Plan, at_once: int = 1) -> int:
    """Bytes on disk while the output is being written: weights, parts and their temporary copies, copied files, documents."""
    owners = [plan.base, *(plan.experts[head.expert] for head in plan.heads)]
    if plan.vocabulary:  # a union's tokenizer is as large as all of them at most
        owners += [expert for expert in plan.experts if expert not in owners]
    copied = sum(path.stat().st_size for model in owners for path in model.side_files())
    temporary = plan.temporary_bytes * min(at_once, len(plan.shards))
    return plan.output_bytes + temporary + copied + _DOCUMENTS + _DOCUMENTS_PER_TENSOR * len(plan.tensors)


def check_space(output: Path, needed: int) -> str | None:
    """A problem report if the disk cannot hold the output; what an interrupted run has already written counts as there."""
    existing = next(p for p in output.resolve().parents if p.exists())
    free = shutil.disk_usage(existing).free
    partial = partial_folder(output)
    written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
    if needed <= free + written:
        return None
    short = f"needs {human_bytes(needed)}, the disk has {human_bytes(free)} free"
    return f"output {output}: {short}; make room, use another disk, {FORCE}"


def peak_memory(plans: Sequence[Plan]) -> int:
    """Estimated peak of this process's own memory while plans that differ in their options alone are carried out together."""
    together = max(tensor_memory(tensor, len(plans)) for tensor in plans[0].tensors)
    return max(plans[0].peak_memory, plans[0].accounts + together)


def tensor_memory(tensor: PlannedTensor, settings: int) -> int:
    """The same of one tensor: with what its method's shared route holds besides, if there are several settings."""
    alone = estimates.peak_memory(tensor)
    if settings == 1 or not is_computed(tensor):
        return alone
    further = min(settings, estimates.wholes_at_once(tensor)) - 1 if tensor.fate.view.is_apart else 0
    return alone + further * tensor.output_header.nbytes + max(map(_shared_route_memory, apart(tensor)))


def _shared_route_memory(matrix: ComputedTensor) -> int:
    """What it holds beyond the method's own."""
    if (route := find_route(matrix.fate.method)) is None:
        return 0
    shape = core_shape(matrix)
    return int(8 * max(0.0, route.float64_elements(*shape) - get_method(matrix.fate.method).float64_elements(*shape)))


def check_memory(needed: int) -> str | None:
    """A problem report if the largest tensor's work cannot fit in memory."""
    free = available_memory()
    if needed <= free:
        return None
    return (
        f"memory: the largest tensor needs about {human_bytes(needed)}, {human_bytes(free)} are free; close other programs, "
        f"merge fewer experts at a time, choose a method that needs less (`acemerge plan` shows it), {FORCE}"
    )


def available_memory() -> int:
    """Bytes that this process can still get, by the system's account and, on Linux, its container's."""
    free, allowed = int(psutil.virtual_memory().available), _container_memory()
    return free if allowed is None else min(free, allowed)


def _container_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the control groups this process is in still allow (version 2), which psutil does not look at."""
    try:
        group = next(line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return None
    place = root / group
    rooms = [_room(folder) for folder in (place, *place.parents) if folder == root or root in folder.parents]
    return min((room for room in rooms if room is not None), default=None)


def _room(group: Path) -> int | None:
    """The limit less what cannot be given back: cached file pages can."""
    try:
        limit = (group / "memory.max").read_text().strip()
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - int(held.get("anon", 0)) if limit.isdigit() else None
