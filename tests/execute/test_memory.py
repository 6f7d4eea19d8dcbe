"""The promise of bounded memory, at a size that CI can afford. The full size is benchmarks/memory.py."""

from pathlib import Path

import pytest

from scripts import load_script


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's memory")
def test_peak_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    benchmark = load_script("benchmarks/memory.py")
    shapes = benchmark.Shapes(layers=1, width=128, vocabulary=80_000, experts=3)
    benchmark.make_models(shapes, tmp_path)
    result = benchmark.measure(shapes, tmp_path)
    assert result.units < shapes.experts + 6
    assert result.units > shapes.experts  # the task vectors were there: the measurement saw the merge
