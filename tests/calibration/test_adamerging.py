"""Merges by AdaMerging: where it starts, where its slopes lead, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acemerge
import model_zoo
from acemerge.calibration.measurements.adamerging import elect
from acemerge.calibration.run import DataRun
from acemerge.calibration.shared_backbone import SharedBackbone
from acemerge.execute.opening import find_sources, make_plan
from acemerge.methods import Context
from acemerge.planning.progress import SilentProgress
from acemerge.planning.tensor import computed
from acemerge.recipe.recipe import make_recipe
from data_merges import FAMILIES, QUICK, ModelsAndRows, every_family, manifest
from data_statistics import write_rows
from model_zoo import Models, read_tensors


@every_family
def test_no_steps_are_task_arithmetic(models_and_rows: ModelsAndRows, family: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(family)
    experts = list(models.experts.values())
    acemerge.merge(models.base, experts, tmp_path / "ada", method="adamerging", data=rows, steps=0)
    acemerge.merge(models.base, experts, tmp_path / "ta", method="task_arithmetic", alpha=0.3)
    found, expected = read_tensors(tmp_path / "ada"), read_tensors(tmp_path / "ta")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)


@every_family
def test_no_steps_of_plus_plus_are_the_sum_that_ties_elects(models_and_rows: ModelsAndRows, family: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(family)
    experts = list(models.experts.values())
    acemerge.merge(models.base, experts, tmp_path / "ada", method="adamerging", data=rows, steps=0, plus_plus=True, keep=0.3)
    acemerge.merge(models.base, experts, tmp_path / "ties", method="ties", alpha=0.3, merge="sum", keep=0.3)
    found, expected = read_tensors(tmp_path / "ada"), read_tensors(tmp_path / "ties")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)


def test_plus_plus_learns_other_coefficients_which_fit_what_was_elected(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    experts = list(models.experts.values())
    for name, plus_plus in (("with", True), ("without", False)):
        acemerge.merge(
            models.base, experts, tmp_path / name, method="adamerging", data=rows, plus_plus=plus_plus, **QUICK["adamerging"]
        )
    learnt = [
        [tensor["coefficient of red"] for tensor in manifest(tmp_path / name)["tensors"] if "coefficient of red" in tensor]
        for name in ("with", "without")
    ]
    assert learnt[0] != learnt[1]
    run = open_run(models, rows)
    elected = elect(run, 0.2)
    merged, base = read_tensors(tmp_path / "with"), read_tensors(models.base)
    for record in (tensor for tensor in manifest(tmp_path / "with")["tensors"] if "coefficient of red" in tensor):
        name = record["name"]
        tau = torch.stack([read_tensors(folder)[name].double() - base[name].double() for folder in experts])
        lambdas = [record[f"coefficient of {expert}"] for expert in models.experts]
        parts = elected.elect(tau, Context(name, tuple(models.experts)))
        expected = base[name].double() + sum(weight * part for weight, part in zip(lambdas, parts, strict=True))
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-5, atol=1e-6)


def open_run(models: Models, rows: Path) -> DataRun:
    recipe = make_recipe(
        {
            "base": str(models.base),
            "experts": [str(f) for f in models.experts.values()],
            "method": "adamerging",
            "data": str(rows),
        }
    )
    plan = make_plan(recipe, find_sources(recipe))
    tensors = [tensor for tensor in computed(plan.tensors) if tensor.action == "merged"]
    return DataRun(plan, tensors, {}, torch.device("cpu"), SilentProgress())


def in_float64(models: Models) -> Models:
    for folder in models.folders:
        model_zoo.write_tensors(folder, {name: t.double() for name, t in read_tensors(folder).items()})
    return models


@pytest.mark.parametrize("plus_plus", [False, True])
@every_family
def test_slopes_of_the_coefficients_by_finite_differences(family: str, plus_plus: bool, tmp_path: Path) -> None:
    """In float64, for every expert and some tensors of every kind."""
    models = in_float64(FAMILIES[family](tmp_path / "models"))
    rows = write_rows(tmp_path / "rows", models.experts, pixels=family == "vit")
    run = open_run(models, rows)
    backbone = SharedBackbone.open(run, elect(run, 0.2) if plus_plus else None)
    batches = [next(run.inputs(expert, 6).batches()) for expert in range(3)]
    coefficients = torch.full((3, len(run.tensors)), 0.3, dtype=torch.float64)

    def entropy(shift: Tensor) -> float:
        backbone.set_coefficients(coefficients + shift)
        return backbone.entropy(batches)

    entropy(torch.zeros_like(coefficients))
    slopes = backbone.slopes()
    step = 1e-4
    for tensor in range(0, len(run.tensors), 5):
        for task in range(3):
            shift = torch.zeros_like(coefficients)
            shift[task, tensor] = step
            difference = (entropy(shift) - entropy(-shift)) / (2 * step)
            assert abs(float(slopes[task, tensor]) - difference) <= 1e-5 * max(1e-3, abs(difference)), run.tensors[tensor].name


def test_entropy_falls_and_the_coefficients_are_on_record(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    run = open_run(models, rows)
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method="adamerging", data=rows, steps=12, batch_size=99,
        learning_rate=0.02,
    )  # fmt: skip
    records = [tensor for tensor in manifest(tmp_path / "out")["tensors"] if "coefficient of red" in tensor]
    learnt = torch.tensor([[record[f"coefficient of {name}"] for record in records] for name in models.experts]).double()
    by_name = {record["name"]: index for index, record in enumerate(records)}
    learnt = learnt[:, [by_name[tensor.name] for tensor in run.tensors]]
    backbone = SharedBackbone.open(run)
    batches = [run.inputs(expert, 1000).some(99, torch.Generator()) for expert in range(3)]
    backbone.set_coefficients(torch.full_like(learnt, 0.3))
    before = backbone.entropy(batches)
    backbone.set_coefficients(learnt)
    assert backbone.entropy(batches) < before
    assert learnt.std() > 0


def test_one_coefficient_for_each_task(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method="adamerging", data=rows, granularity="task",
        **QUICK["adamerging"],
    )  # fmt: skip
    records = [tensor for tensor in manifest(tmp_path / "out")["tensors"] if "coefficient of red" in tensor]
    assert {len({record[f"coefficient of {name}"] for record in records}) for name in models.experts} == {1}
    assert records[0]["coefficient of red"] != 0.3


def test_learning_goes_on_where_it_stopped(
    models_and_rows: ModelsAndRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, rows = models_and_rows("bert")
    experts = list(models.experts.values())
    settings: dict[str, Any] = {"method": "adamerging", "data": rows, "steps": 5, "batch_size": 4}
    monkeypatch.setattr("acemerge.calibration.measurements.adamerging.SAVED_EVERY", 2)
    acemerge.merge(models.base, experts, tmp_path / "whole", **settings)
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "another"))
    steps = 0
    right = SharedBackbone.entropy

    def fails(self: SharedBackbone, batches: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return right(self, batches)

    monkeypatch.setattr(SharedBackbone, "entropy", fails)
    with pytest.raises(KeyboardInterrupt):
        acemerge.merge(models.base, experts, tmp_path / "again", **settings)
    acemerge.merge(models.base, experts, tmp_path / "again", **settings)
    assert steps == 4 + 3, "two of five steps were kept"
    model_zoo.assert_equal_tensors(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "whole"))
