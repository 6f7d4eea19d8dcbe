"""Whole models: everything is measured, and what is measured is what a merge finds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import acemerge
import lora_zoo
import model_zoo
from acemerge.diagnosis.findings import findings, verdict
from acemerge.diagnosis.measure import Diagnosis
from acemerge.diagnosis.summary import Summary, pairs
from acemerge.errors import MergeError
from layered_models import layered


def test_every_weight_that_experts_share_with_the_base_is_measured(family: model_zoo.Models, diagnosis: Diagnosis) -> None:
    plan = acemerge.merge(family.base, family.experts, family.base.parent / "merged", "ace", overwrite=True)
    fates = {record["name"]: record["action"] for record in plan.tensors}
    measured = {tensor.name: tensor.fate for tensor in diagnosis.tensors}
    assert measured.items() <= fates.items()
    assert {name for name, fate in fates.items() if fate == "merged"} == {tensor.name for tensor in diagnosis.matrices}
    assert any(
        tensor.kind == "embedding" and tensor.fate == "kept" and sum(tensor.entries.energies) for tensor in diagnosis.tensors
    )


def test_gamma_branch_ridge_and_lengths_are_those_of_the_merge(family: model_zoo.Models, diagnosis: Diagnosis) -> None:
    merged = acemerge.merge(family.base, family.experts, family.base.parent / "merged", "ace", overwrite=True)
    records = {record["name"]: record for record in merged.tensors}
    for tensor in diagnosis.matrices:
        record = records[tensor.name]
        assert tensor.gamma == pytest.approx(record["gamma"])
        assert tensor.heterogeneous == (record["branch"] == "heterogeneous")
        assert tensor.ridge_share == pytest.approx(record["ridge_share"])
        assert tensor.forecasts["ace"].norm_ratio == pytest.approx(record["norm_ratio"], rel=1e-5)
        np.testing.assert_allclose(np.sqrt(tensor.entries.energies), record["task_norms"], rtol=1e-6)


def test_cosines_are_those_of_all_matrices_in_one_vector(family: model_zoo.Models, diagnosis: Diagnosis) -> None:
    base = model_zoo.read_tensors(family.base)
    vectors = []
    for folder in family.experts.values():
        expert = model_zoo.read_tensors(folder)
        vectors.append(torch.cat([(expert[t.name] - base[t.name]).double().flatten() for t in diagnosis.matrices]))
    stacked = torch.nn.functional.normalize(torch.stack(vectors))
    np.testing.assert_allclose(Summary(diagnosis).cosines, (stacked @ stacked.T).numpy(), atol=1e-6)  # type: ignore[arg-type]


def test_quick_measures_forecasts_in_a_sample_only(tmp_path: Path) -> None:
    models = layered(tmp_path, layers=7, experts=2)
    found = acemerge.diagnose(*models, quick=True)
    with_forecast = [tensor.depth for tensor in found.matrices if tensor.forecasts]
    assert set(with_forecast) == {0, 3, 6}
    assert all(tensor.gamma is not None for tensor in found.matrices)
    assert all(tensor.spectra is None for tensor in found.matrices if not tensor.forecasts)


def test_adapters_are_measured_like_the_models_they_make(tmp_path: Path) -> None:
    zoo = lora_zoo.build(tmp_path, "LlamaForCausalLM")
    from_adapters, from_models = acemerge.diagnose(zoo.base, zoo.adapters), acemerge.diagnose(zoo.base, zoo.full)
    expected = {tensor.name: tensor for tensor in from_models.matrices}
    assert from_adapters.matrices
    for tensor in from_adapters.matrices:
        other = expected[tensor.name]
        np.testing.assert_allclose(tensor.entries.inner, other.entries.inner, rtol=1e-4, atol=1e-9)
        for candidate, forecast in tensor.forecasts.items():
            if candidate != "tsv_m":  # which sees rounding as directions in expanded experts
                assert forecast.objective == pytest.approx(other.forecasts[candidate].objective, rel=1e-2), (
                    tensor.name,
                    candidate,
                )


def test_an_adapter_is_of_its_base_however_strong(tmp_path: Path) -> None:
    strong = {name: {**settings, "strength": 30.0} for name, settings in lora_zoo.LORAS["GPT2LMHeadModel"].items()}
    zoo = lora_zoo.build(tmp_path, "GPT2LMHeadModel", strong)
    found = acemerge.diagnose(zoo.base, zoo.adapters)
    assert found.adapters == tuple(zoo.adapters)
    level, _ = verdict(findings(found))
    assert level == "caution"


def test_tensors_of_another_shape_are_left_out(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, layers=1, experts=1)
    tensors = model_zoo.read_tensors(experts[0])
    tensors["embed_tokens.weight"] = torch.zeros(99, 8)
    model_zoo.write_tensors(experts[0], tensors)
    found = acemerge.diagnose(base, experts, preset="llm")
    assert "embed_tokens.weight" not in [tensor.name for tensor in found.tensors]
    assert any("embed_tokens" in note for note in found.notes)


def test_one_expert_alone_can_be_diagnosed(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 1)
    found = acemerge.diagnose(base, experts)
    assert pairs(Summary(found).cosines) == []
    assert Summary(found).forecasts["average"] == pytest.approx(0, abs=1e-9)


def test_nan_is_told_with_model_and_tensor(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    tensors = model_zoo.read_tensors(experts[1])
    tensors["layers.0.mlp.up_proj.weight"][0, 0] = math.nan
    model_zoo.write_tensors(experts[1], tensors)
    with pytest.raises(MergeError, match=r"layers.0.mlp.up_proj.weight.*expert-1.*1 NaN"):
        acemerge.diagnose(base, experts)
