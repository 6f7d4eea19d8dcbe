"""What ACE assumes of a layer's inputs, measured."""

from __future__ import annotations

from pathlib import Path

from acemerge.bench.analyses.premise import measure_premise, premise_table
from tiny_bench import SUITE


def test_premise_sees_the_inputs_of_every_merged_layer(cache: Path) -> None:
    found = measure_premise(SUITE, 0, 40, lambda message: None)
    matrices = {a.tensor for a in found}
    assert len(matrices) == 12
    assert len(found) == 12 * 3
    assert all(0 < a.own <= 1 and 0 < a.identity <= 1 for a in found)
    # Inputs of a task are at least as near to its own weight change as to a matrix that knows nothing, on the whole.
    assert sum(a.own for a in found) > sum(a.identity for a in found)
    assert len(premise_table(found, "task")) == 4
