"""Names of tensors that differ in the numbers of their layers only, written as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def together(items: Iterable[tuple[str, Hashable, Item]]) -> list[tuple[str, list[Item]]]:
    """(name, what must be alike, item) -> those alike under one name, in the order of the first of each.

    >>> together([("h.0.w", "kept", 1), ("h.0.b", "kept", 2), ("h.1.w", "kept", 3), ("h.3.w", "kept", 4)])
    [('h.{0..1,3}.w', [1, 3, 4]), ('h.0.b', [2])]
    """
    groups: dict[Hashable, list[tuple[list[str], Item]]] = {}
    for name, alike, item in items:
        parts = name.split(".")
        pattern = tuple("{}" if part.isdigit() else part for part in parts)
        groups.setdefault((pattern, alike), []).append((parts, item))
    return [(_common_name([parts for parts, _ in group]), [item for _, item in group]) for group in groups.values()]


def _common_name(names: Sequence[Sequence[str]]) -> str:
    return ".".join(column[0] if len(set(column)) == 1 else f"{{{_ranges(column)}}}" for column in zip(*names, strict=True))


def _ranges(numbers: Iterable[str]) -> str:
    """0..2,5"""
    runs: list[list[int]] = []
    for number in sorted(set(map(int, numbers))):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
