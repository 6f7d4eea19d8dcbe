"""How much of a merged change an adapter holds, in energy: the square of the change's length, which adds up over tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from acemerge.layer_names import kind_of, kinds_in_order

Record = Mapping[str, Any]
"""Of a tensor, as the manifest has it."""


def shares_of_change(records: Iterable[Record]) -> dict[str, float]:
    """What is in factors, saved whole, cut off by their rank and rounding, and left out; together 1."""
    found = dict.fromkeys(("factors", "saved", "cut", "left_out"), 0.0)
    for record in (record for record in records if "norm" in record):
        energy = record["norm"] ** 2
        if record["written"] == "factors":
            found["factors"] += energy * record["energy_kept"]
            found["cut"] += energy * (1 - record["energy_kept"])
        else:
            found["saved" if record["written"] == "value" else "left_out"] += energy
    total = math.fsum(found.values())
    return {what: energy / total for what, energy in found.items()} if total else found


@dataclass(frozen=True)
class KindOfTensor:
    """Tensors of one kind that are written in one form."""

    kind: str
    written: str
    records: list[Record]
    share: float
    """Of the whole change."""

    def range_of(self, fact: str) -> tuple[float, float] | None:
        """The smallest and the largest value."""
        values = [record[fact] for record in self.records if fact in record]
        return (min(values), max(values)) if values else None


def kinds_of_change(records: Iterable[Record]) -> list[KindOfTensor]:
    """What was changed, by kind of layer and form, as a layer has them."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in (record for record in records if "norm" in record):
        groups.setdefault((kind_of(record["name"], len(record["shape"])), record["written"]), []).append(record)
    total = math.fsum(record["norm"] ** 2 for group in groups.values() for record in group) or 1.0
    order = kinds_in_order(kind for kind, _ in groups)
    return [
        KindOfTensor(kind, written, group, math.fsum(record["norm"] ** 2 for record in group) / total)
        for (kind, written), group in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    ]
