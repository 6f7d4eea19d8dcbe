"""The promise of bounded memory, at a size that CI can afford. The full size is benchmarks/memory.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's memory")
def test_peak_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    benchmark = load_benchmark()
    shapes = benchmark.Shapes(layers=1, width=128, vocabulary=200_000, experts=3)
    benchmark.make_models(shapes, tmp_path)
    result = benchmark.measure(shapes, tmp_path)
    assert result.units < shapes.experts + 6
    assert result.units > shapes.experts  # the task vectors were there: the measurement saw the merge
