"""How much of a model has which fate, counted in weights: one matrix may hold as many numbers as a thousand norms."""

from __future__ import annotations

from collections.abc import Iterable

from acemerge.planning.fates import Action

ACTIONS: tuple[Action, ...] = ("merged", "averaged", "kept", "copied")


def weights_by_fate(tensors: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Fate -> how many numbers have it, of (fate, numbers) of each tensor."""
    found: dict[str, int] = dict.fromkeys(ACTIONS, 0)
    for action, elements in tensors:
        found[action] = found.get(action, 0) + elements
    return found


def shares_told(weights: dict[str, int]) -> str:
    """As people read it; fates that no weight has are left out.

    >>> shares_told({"merged": 640, "averaged": 0, "kept": 359, "copied": 1})
    '64.0% merged, 35.9% kept, 0.1% copied'
    """
    total = max(1, sum(weights.values()))
    return ", ".join(f"{count / total:.1%} {action}" for action, count in weights.items() if count)
