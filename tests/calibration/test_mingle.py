"""Gates learnt on rows: the mixture is the model with weights mixed in, and learning it brings it to the experts' answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acemerge
from acemerge.calibration.measurements.mingle import learn_gates, measure_gates, open_mixture, open_student, remember_inputs
from acemerge.calibration.run import DataRun
from acemerge.checkpoints.families import is_task_head
from acemerge.execute.opening import find_sources, make_plan
from acemerge.methods.mingle import MingleOptions, low_rank_experts
from acemerge.output.task_models import export_expert
from acemerge.planning.progress import SilentProgress
from acemerge.planning.tensor import computed
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.task_vectors import load_dense
from data_merges import ModelsAndRows, every_family, load, manifest, rows_of
from model_zoo import Models, read_tensors

QUICK: dict[str, Any] = {"steps": 4, "batch_size": 4, "learning_rate": 0.02, "directions": 4}


def open_run(models: Models, rows: Path) -> DataRun:
    experts = [str(folder) for folder in models.experts.values()]
    recipe = make_recipe({"base": str(models.base), "experts": experts, "method": "mingle", "data": str(rows)})
    plan = make_plan(recipe, find_sources(recipe))
    hashes = {model.name: {"file": model.name} for model in (plan.base, *plan.experts)}
    merged = [tensor for tensor in computed(plan.tensors) if tensor.action == "merged"]
    return DataRun(plan, merged, hashes, torch.device("cpu"), SilentProgress())


@every_family
def test_a_task_is_the_base_with_its_gates_share_of_every_expert(
    models_and_rows: ModelsAndRows, family: str, tmp_path: Path
) -> None:
    models, rows = models_and_rows(family)
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="mingle", data=rows, **QUICK)
    run, base = open_run(models, rows), read_tensors(models.base)
    learnt, names = measure_gates(run, MingleOptions(**QUICK)), tuple(models.experts)
    told = {record["name"]: record for record in manifest(tmp_path / "out")["tensors"]}
    for expert in models.experts:
        export_expert(tmp_path / "out", expert, tmp_path / expert)
        found = read_tensors(tmp_path / expert)
        for planned in run.tensors:
            gates = learnt.gates(expert, planned.name, names)
            assert told[planned.name][f"own gate of {expert}"] == pytest.approx(gates[names.index(expert)])
            experts = low_rank_experts(load_dense(run.plan, planned, run.device), 4)
            change = sum((g * f for g, f in zip(gates, experts, strict=True)), torch.zeros_like(experts[0]))
            expected = base[planned.name].double() + planned.fate.view.to_stored(change)
            torch.testing.assert_close(found[planned.name].double(), expected, rtol=1e-5, atol=1e-6)
        kept = [t.name for t in run.plan.tensors if t.action == "kept" and t.name in found and not is_task_head(t.name)]
        assert kept
        assert all(found[name].equal(base[name]) for name in kept)
    assert any(gate for expert in names for planned in run.tensors for gate in learnt.gates(expert, planned.name, names))


def test_no_steps_leave_every_task_with_the_base(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="mingle", data=rows, steps=0)
    export_expert(tmp_path / "out", "red", tmp_path / "red")
    base, found = read_tensors(models.base), read_tensors(tmp_path / "red")
    assert all(found[name].allclose(tensor) for name, tensor in base.items() if name in found and "classifier" not in name)


@every_family
def test_the_mixture_is_the_model_with_its_weights_mixed_in(models_and_rows: ModelsAndRows, family: str) -> None:
    """The first expert's gates, by what each layer was given, put into the weights of a model of its own."""
    models, rows = models_and_rows(family, padded=False) if family != "vit" else models_and_rows(family)
    run, options = open_run(models, rows), MingleOptions(directions=4)
    mixture, student = open_mixture(run, options), open_student(run, 0)
    generator = torch.Generator().manual_seed(5)
    for gate in mixture.gates.values():
        weight, bias = gate.add()
        with torch.no_grad():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
            bias.fill_(0.5)
    batch = run.inputs(0, 6).some(6, torch.Generator().manual_seed(1))
    mixture.begin(batch)
    with torch.no_grad(), mixture.in_place(student):
        found = run.logits(0, student, batch)
    mixed = open_student(run, 0)
    for planned in run.tensors:
        gate, value = mixture.gates[planned.name], mixture.seen.get(planned.name)
        if value is not None:
            change = planned.fate.view.to_stored(gate.change(value))
            mixed.install(planned.name, mixed.tensor(planned.name) + change)
    torch.testing.assert_close(run.logits(0, mixed, batch), found, rtol=1e-4, atol=1e-5)
    assert not found.allclose(run.logits(0, open_student(run, 0), batch), rtol=1e-4, atol=1e-5)


def test_gates_learn_the_experts_answers_and_the_gradient_is_plain(models_and_rows: ModelsAndRows) -> None:
    models, rows = models_and_rows("bert", rows=8)
    run = open_run(models, rows)
    options = MingleOptions(directions=16, steps=40, batch_size=8, learning_rate=0.02, rows=8)
    mixture, student = open_mixture(run, options), open_student(run, 0)
    losses = learn_gates(run, mixture, student, 0, options)
    assert losses[-1] < losses[0]
    remember_inputs(run, mixture, student, 0, options)
    assert all(gate.span is not None and gate.span.shape[1] == 3 for gate in mixture.gates.values())
    first = {name: gate.weights[0].detach().clone() for name, gate in mixture.gates.items()}
    learn_gates(run, mixture, open_student(run, 1), 1, options)
    assert all(gate.weights[0].equal(first[name]) for name, gate in mixture.gates.items())  # what was learnt stays
    assert any(gate.weights[1].any() for gate in mixture.gates.values())


def test_the_loss_is_the_cross_entropy_under_the_experts_answers(models_and_rows: ModelsAndRows) -> None:
    """Before the first step the mixture is the base under the expert's head."""
    models, rows = models_and_rows("vit", rows=4)
    run = open_run(models, rows)
    options = MingleOptions(directions=4, steps=1, batch_size=4, rows=4, temperature=2.0)
    [loss] = learn_gates(run, open_mixture(run, options), open_student(run, 0), 0, options)
    name, folder = next(iter(models.experts.items()))
    teacher, student = load(folder), load(folder)
    base = read_tensors(models.base)
    own = dict(student.named_parameters())
    with torch.no_grad():
        for stored, value in base.items():
            theirs = own.get(stored, own.get(f"vit.{stored}"))
            if theirs is not None and not stored.startswith("classifier"):
                theirs.copy_(value)
        batch: dict[str, Tensor] = rows_of(rows, name)
        wanted = (teacher(**batch).logits / 2).softmax(1)
        expected = -(wanted * (student(**batch).logits / 2).log_softmax(1)).sum(1).mean()
    assert loss == pytest.approx(float(expected), rel=1e-4)


def test_low_rank_experts_take_the_experts_order(models_and_rows: ModelsAndRows) -> None:
    models, rows = models_and_rows("bert")
    run = open_run(models, rows)
    mixture = open_mixture(run, MingleOptions(directions=2))
    name = run.tensors[0].name
    tau = torch.stack([read_tensors(folder)[name] - read_tensors(models.base)[name] for folder in models.experts.values()])
    torch.testing.assert_close(mixture.gates[name].experts, torch.stack(low_rank_experts(tau, 2)).float(), rtol=1e-4, atol=1e-6)
