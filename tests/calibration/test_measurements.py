"""The registry of measurements: what brings one, and what is said where there is none."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import acemerge
import model_zoo
from acemerge.calibration import registry as measurements
from acemerge.calibration.run import DataRun
from acemerge.errors import InputError
from acemerge.methods import Context, Options, all_methods, method
from acemerge.methods import registry as methods
from data_statistics import write_rows
from model_zoo import read_tensors


@dataclass(frozen=True)
class ByRowsOptions(Options):
    rows: int = 100


def register_method() -> None:
    @method("by_rows", title="Weighted by rows", paper="none", touches="all", uses="data")
    def by_rows(task_vectors: Tensor, options: ByRowsOptions, context: Context) -> Tensor:
        """Whoever has more data counts more."""
        weights = torch.tensor([float(context.statistics[expert]) for expert in context.experts])
        mean: Tensor = torch.tensordot(weights / weights.sum(), task_vectors, dims=1)
        return mean


def register_measurement() -> None:
    @measurements.measures("by_rows")
    def count_rows(run: DataRun, options: ByRowsOptions) -> dict[str, int]:
        return {expert.name: run.inputs(index, options.rows).rows for index, expert in enumerate(run.experts)}


def entry_points(monkeypatch: pytest.MonkeyPatch, *groups: str) -> None:
    """Another package is installed, with entry points in these groups."""

    class Method:
        load = staticmethod(register_method)

    class Measurement:
        load = staticmethod(register_measurement)

    installed = {"acemerge.methods": Method, "acemerge.measurements": Measurement}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [installed[group]] if group in groups else [])


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """What it registers is forgotten afterwards."""
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    registries = (methods, measurements)
    for registry in registries:
        registry._discover.cache_clear()
    yield monkeypatch
    for registry in registries:
        registry._registered.pop("by_rows", None)
        registry._discover.cache_clear()


def test_every_method_that_uses_data_has_a_measurement_and_no_other_has() -> None:
    using = {method.name for method in all_methods() if method.uses == "data"}
    for name in using:
        assert callable(measurements.measurement_of(name))
    assert set(measurements._registered) == using


def test_a_method_and_its_measurement_from_another_package(other_package: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry_points(other_package, "acemerge.methods", "acemerge.measurements")
    models = model_zoo.bert(tmp_path / "models")
    (few, few_folder), (many, many_folder), *_ = models.experts.items()
    rows, more = write_rows(tmp_path / "rows", [few], rows=3), write_rows(tmp_path / "more", [many], rows=9)
    (more / f"{many}.safetensors").rename(rows / f"{many}.safetensors")
    acemerge.merge(models.base, {few: few_folder, many: many_folder}, tmp_path / "out", method="by_rows", data=rows)
    name = "encoder.layer.0.attention.self.query.weight"
    base, ours, theirs, merged = (
        next(tensor for own, tensor in read_tensors(folder).items() if own.endswith(name))
        for folder in (models.base, few_folder, many_folder, tmp_path / "out")
    )
    torch.testing.assert_close(merged, base + 0.25 * (ours - base) + 0.75 * (theirs - base))


def test_a_method_without_a_measurement_is_told_before_any_work(other_package: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry_points(other_package, "acemerge.methods")
    models = model_zoo.bert(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts)
    with pytest.raises(InputError, match="method 'by_rows' uses data, and nothing is registered that measures it") as caught:
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="by_rows", data=rows)
    assert "'acemerge.measurements'" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()
