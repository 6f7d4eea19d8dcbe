"""A merge that went further than those that beat averaging says so, and what to run instead."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

import acemerge
import lora_zoo
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.output.overreach import LIMIT, overreach
from command import Command
from small_models import Models, base_tensors, fine_tuned, write_model, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def expected(models: Models, alpha: float) -> float:
    """Of task arithmetic, written out: |alpha sum_t D_t| over what the guard allows, in the middle of the matrices."""
    base = load_file(models.base / "model.safetensors")
    experts = [load_file(folder / "model.safetensors") for folder in models.experts]
    times = []
    for name in (name for name, value in base.items() if value.dim() == 2):
        W0 = base[name].double()
        changes = torch.stack([expert[name].double() - W0 for expert in experts])
        D = float(changes.square().sum((1, 2)).mean().sqrt())
        allowed = max(D, 1.1 * math.sqrt(float(W0.norm()) * D))
        assert float(W0.norm()) / 3 > D
        times.append(alpha * float(changes.sum(0).norm()) / allowed)
    return median(times)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0])
def test_it_is_the_length_over_the_geometric_mean_of_base_and_expert(models: Models, tmp_path: Path, alpha: float) -> None:
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", method="task_arithmetic", alpha=alpha)
    found = overreach(result.plan, read_merge(tmp_path / "out").tensors)
    if alpha >= 1:  # longer than an expert: below that the base is not looked at, and any number up to 1 will do
        assert found == pytest.approx(expected(models, alpha), rel=1e-4)
    else:
        assert found is not None
        assert found <= 1


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_it_warns_above_one_and_only_there(models: Models, tmp_path: Path, alpha: float) -> None:
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", method="task_arithmetic", alpha=alpha)
    cautions = json.loads((tmp_path / "out" / MANIFEST).read_text())["cautions"]
    assert result.warnings == cautions == list(result.plan.cautions)
    assert len(cautions) == (expected(models, alpha) > 1)
    assert str(tmp_path) not in " ".join(cautions)
    assert expected(models, 1.0) < 1 < expected(models, 4.0)


def test_the_warning_survives_quiet_and_its_command_runs(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capsys)
    code, out, err = command("merge", *models.arguments, "-o", tmp_path / "out", "-m", "task_arithmetic", "-s", "alpha=4", "-q")
    assert (code, out) == (0, "")
    assert "times as long as a merge of these models should be" in err
    instead = shlex.split(err.split("compare it with -m average: ")[1])
    assert instead[:2] == ["acemerge", "merge"]
    assert command(*instead[1:], "-q") == (0, "", "")
    assert read_merge(tmp_path / "out-average").method == "average"


def test_the_command_of_an_adapter_makes_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = lora_zoo.write_base(tmp_path / "base", "LlamaForCausalLM")
    adapters = [
        lora_zoo.write_adapter(
            base, tmp_path / f"a{i}", "LlamaForCausalLM", seed=i, r=1, strength=0.01, target_modules=["q_proj"]
        )
        for i in range(2)
    ]
    command = Command(monkeypatch, capsys)
    flags = ("-m", "task_arithmetic", "-s", "alpha=1000", "--as", "adapter", "--rank", "1", "-q")
    _, _, err = command("merge", base, *adapters, "-o", tmp_path / "out", *flags)
    instead = shlex.split(next(line for line in err.splitlines() if "compare it" in line).split("-m average: ")[1])
    assert command(*instead[1:], "-q")[0] == 0
    assert json.loads((tmp_path / "out-average/adapter_config.json").read_text())["r"] == 1


def test_one_expert_and_averages_never_go_too_far(models: Models, tmp_path: Path) -> None:
    far = write_model(tmp_path / "far", fine_tuned(base_tensors(), 7, strength=0.7))
    alone = acemerge.merge(models.base, [far], tmp_path / "alone", method="task_arithmetic", alpha=1.0)
    mean = acemerge.merge(models.base, [far, *models.experts], tmp_path / "mean", method="average")
    assert not alone.plan.cautions
    assert not mean.plan.cautions


def test_adapters_may_go_less_far_by_the_share_of_directions(tmp_path: Path) -> None:
    base = lora_zoo.write_base(tmp_path / "base", "LlamaForCausalLM")
    adapters = [
        lora_zoo.write_adapter(
            base, tmp_path / f"a{i}", "LlamaForCausalLM", seed=i, r=1, lora_alpha=0.001, target_modules=["o_proj"]
        )
        for i in range(2)
    ]
    result = acemerge.merge(base, adapters, tmp_path / "out", method="tsv_m", alpha=30.0, force=True)
    records = [tensor for tensor in read_merge(tmp_path / "out").tensors if tensor.number("norm")]
    weights, times = load_file(base / "model.safetensors"), []
    for record in records:
        W0, norms = weights[record.name], record.numbers("task_norms")
        D = math.sqrt(sum(norm**2 for norm in norms) / 2)
        reach = LIMIT * math.sqrt(float(W0.double().norm()) * D) * (2 / min(W0.shape)) ** 0.75
        assert reach > D
        times.append((record.number("norm") or 0.0) / reach)
    assert records
    assert overreach(result.plan, records) == pytest.approx(median(times), rel=1e-5)


def test_what_was_not_measured_is_not_judged(models: Models, tmp_path: Path) -> None:
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", method="emr")
    assert overreach(result.plan, read_merge(tmp_path / "out").tensors) is None


def test_experts_that_moved_most_of_the_way_are_not_judged(models: Models, tmp_path: Path) -> None:
    far = [write_model(tmp_path / f"far{i}", fine_tuned(base_tensors(), i, strength=0.7)) for i in range(2)]
    result = acemerge.merge(models.base, far, tmp_path / "out", method="task_arithmetic", alpha=9.0, force=True)
    assert overreach(result.plan, read_merge(tmp_path / "out").tensors) is None
