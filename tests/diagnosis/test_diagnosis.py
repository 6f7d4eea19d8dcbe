"""What a diagnosis measures, against numpy and scipy; what it says, against experts made to show it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

import acemerge
import lora_zoo
import model_zoo
from acemerge.diagnosis.entries import BINS, REACH, Entries, distance_from_normal, read_entries
from acemerge.diagnosis.findings import findings, verdict
from acemerge.diagnosis.interference import Objective
from acemerge.diagnosis.measure import Diagnosis
from acemerge.diagnosis.spectra import measure_spectra
from acemerge.diagnosis.summary import Summary, pairs
from acemerge.errors import InputError, MergeError
from acemerge.methods import get_method
from acemerge.numerics.frame import Factors, Frame, to_cores
from acemerge.planning.layer_names import depths, kind_of
from layered_models import layered
from small_models import write_model


def random_tasks(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(tasks: int, rows: int, columns: int, rank: int) -> tuple[Tensor, Frame, Tensor]:
    """Dense task vectors of low rank, and the same as cores in a frame."""
    left, right = random_tasks(tasks, rows, rank), random_tasks(tasks, rank, columns, seed=1)
    frame, cores = to_cores([Factors(a, b) for a, b in zip(left, right, strict=True)], (rows, columns), "both")
    return left @ right, frame, cores


# --- entries -----------------------------------------------------------------------------------------------------------


def test_entries_agree_with_numpy_and_scipy() -> None:
    tasks = random_tasks(3, 40, 50) ** 3  # far from normal
    tasks[1, :20] = 0
    base = random_tasks(40, 50, seed=9)
    found = read_entries(tasks, None, base)
    flat, W0 = tasks.reshape(3, -1).numpy(), base.reshape(-1).numpy()
    np.testing.assert_allclose(found.inner, flat @ flat.T)
    np.testing.assert_allclose(found.mean, flat.mean(1), atol=1e-12)
    np.testing.assert_allclose(found.deviation, flat.std(1))
    np.testing.assert_allclose(found.skewness, scipy.stats.skew(flat, 1), rtol=1e-8)
    np.testing.assert_allclose(found.excess_kurtosis, scipy.stats.kurtosis(flat, 1), rtol=1e-8)
    for s in range(3):
        for t in range(3):
            both = (flat[s] != 0) & (flat[t] != 0)
            assert found.signs_shared[s][t] == both.sum()
            assert found.signs_opposed[s][t] == (both & (np.sign(flat[s]) != np.sign(flat[t]))).sum()
        counts, _ = np.histogram(np.clip(flat[s] / np.sqrt((flat[s] ** 2).mean()), -REACH, REACH), BINS, (-REACH, REACH))
        assert np.abs(np.array(found.histogram[s]) - counts).sum() <= 2  # float32 may put one on the other side of an edge
        cosine = np.dot(W0, W0 + flat[s]) / np.linalg.norm(W0) / np.linalg.norm(W0 + flat[s])
        assert found.base_cosine[s] == pytest.approx(cosine)


def test_entries_of_low_rank_experts_are_those_of_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acemerge.numerics.linalg._BLOCK_ELEMENTS", 200)  # several blocks
    dense, frame, cores = low_rank(3, 20, 30, 2)
    base = random_tasks(20, 30, seed=5)
    expected, found = read_entries(dense, None, base), read_entries(cores, frame, base)
    for name in ("inner", "mean", "deviation", "skewness", "excess_kurtosis", "base_inner", "base_energy"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12, err_msg=name)
    assert found.signs_opposed == expected.signs_opposed
    assert found.histogram == expected.histogram


def test_distance_from_the_normal_distribution() -> None:
    normal = read_entries(random_tasks(1, 300, 300), None, torch.ones(300, 300))
    assert normal.normal_distance[0] is not None
    assert normal.normal_distance[0] < 0.01
    uniform = torch.rand(1, 300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    found = read_entries(uniform, None, torch.ones(300, 300)).normal_distance[0]
    scaled = (uniform / uniform.square().mean().sqrt()).flatten().numpy()
    assert found == pytest.approx(scipy.stats.kstest(scaled, "norm").statistic, abs=0.005)
    assert distance_from_normal([0] * BINS) is None


def test_an_expert_that_changed_nothing_has_no_distribution() -> None:
    found = read_entries(torch.zeros(1, 4, 4), None, torch.ones(4, 4))
    assert (found.energies, found.normal_distance, found.base_cosine) == ([0.0], [None], [1.0])
    assert (found.skewness, found.excess_kurtosis) == ([0.0], [0.0])


# --- spectra and interference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_spectra_agree_with_numpy(shape: tuple[int, int]) -> None:
    tasks, P, M = random_tasks(2, *shape), random_tasks(*shape, seed=3), random_tasks(*shape, seed=4)
    found = measure_spectra(tasks, P, M, shape)
    U, s, Vt = np.linalg.svd(P.numpy(), full_matrices=False)
    U2, s2, Vt2 = np.linalg.svd(M.numpy(), full_matrices=False)
    k = 2  # 5% of 40
    assert found.plain.values[0] == pytest.approx(s[0])
    assert found.plain.values[-1] == pytest.approx(s[-1], rel=1e-6)
    assert found.plain.leading_energy == pytest.approx((s[:k] ** 2).sum() / (s**2).sum())
    assert found.merged.stable_rank == pytest.approx((s2**2).sum() / s2[0] ** 2)
    assert found.leading_cosine == pytest.approx(min(abs(U[:, 0] @ U2[:, 0]), abs(Vt[0] @ Vt2[0])))
    rights = [np.linalg.svd(D.numpy())[2][:k] for D in tasks]
    angles = scipy.linalg.subspace_angles(rights[0].T, rights[1].T)
    assert found.overlap[0][1] == pytest.approx((np.cos(angles) ** 2).mean())
    assert found.overlap[0][0] == pytest.approx(1)
    assert found.chance == k / shape[1]
    energy = np.linalg.svd(tasks[0].numpy(), compute_uv=False) ** 2
    assert found.leading_energies[0] == pytest.approx(energy[:k].sum() / energy.sum())


def reference_objective(M: Tensor, D: Tensor) -> float:
    """Tr[(M - D) Shat (M - D)^T], from the definition."""
    C = D - D.mean(0, keepdim=True)
    error = M - D
    return float(torch.trace(error @ (C.T @ C) @ error.T))


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
def test_interference_is_the_layer_objective_over_the_base_s(shape: tuple[int, int]) -> None:
    tasks, M = random_tasks(3, *shape), random_tasks(*shape, seed=2)
    own, together = Objective(tasks, None).of(M)
    zero = torch.zeros_like(M)
    terms, base = [reference_objective(M, D) for D in tasks], [reference_objective(zero, D) for D in tasks]
    np.testing.assert_allclose([value or 0 for value in own], [a / b for a, b in zip(terms, base, strict=True)])
    assert together == pytest.approx(sum(terms) / sum(base))
    assert Objective(tasks, None).of(zero) == ([1.0] * 3, 1.0)
    assert Objective(tasks, None).of(tasks[1])[0][1] == 0.0


def test_interference_in_the_core_is_that_of_the_products() -> None:
    dense, frame, cores = low_rank(3, 20, 30, 2)
    ace = get_method("ace")
    options = ace.options({"epsilon": 1e-3})
    M = ace(dense, options).delta
    core = ace(cores, options, acemerge.methods.Context(experts=("a", "b", "c"), frame=frame)).delta
    expected, found = Objective(dense, None).of(M), Objective(cores, frame).of(core)
    np.testing.assert_allclose([*found[0], found[1]], [*expected[0], expected[1]], rtol=1e-7)  # type: ignore[arg-type]


def test_an_expert_without_a_covariance_has_no_forecast() -> None:
    own, together = Objective(torch.zeros(1, 3, 4), None).of(torch.ones(3, 4))
    assert (own, together) == ([None], None)


# --- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert.encoder.layer.0.attention.self.query.weight", "attention q"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention out"),
        ("bert.encoder.layer.0.intermediate.dense.weight", "MLP up"),
        ("bert.encoder.layer.0.output.dense.weight", "MLP down"),
        ("bert.embeddings.word_embeddings.weight", "embedding"),
        ("transformer.h.0.attn.c_attn.weight", "attention qkv"),
        ("transformer.h.0.attn.c_proj.weight", "attention out"),
        ("transformer.h.0.mlp.c_fc.weight", "MLP up"),
        ("transformer.h.0.mlp.c_proj.weight", "MLP down"),
        ("transformer.wte.weight", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "attention q"),
        ("model.layers.0.self_attn.v_proj.weight", "attention v"),
        ("model.layers.0.self_attn.o_proj.weight", "attention out"),
        ("model.layers.0.mlp.gate_proj.weight", "MLP up"),
        ("model.layers.0.mlp.down_proj.weight", "MLP down"),
        ("vision_model.encoder.layers.0.mlp.fc1.weight", "MLP up"),
        ("vision_model.encoder.layers.0.self_attn.out_proj.weight", "attention out"),
        ("visual.transformer.resblocks.0.attn.in_proj_weight", "attention qkv"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "attention q"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "MLP up"),
        ("encoder.block.0.layer.1.DenseReluDense.wo.weight", "MLP down"),
        ("layers.1.blocks.0.attn.qkv.weight", "attention qkv"),
        ("something.else.weight", "other"),
    ],
)
def test_kinds_of_the_usual_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_what_is_no_matrix_is_told_by_its_shape() -> None:
    assert kind_of("model.layers.0.mlp.fc1.bias", 1) == "bias"
    assert kind_of("model.layers.0.input_layernorm.weight", 1) == "norm"
    assert kind_of("patch_embed.seq.0.c.weight", 4) == "convolution"


def test_depth_counts_layers_through_stages_and_towers() -> None:
    stages = [f"layers.{stage}.blocks.{block}.attn.qkv.weight" for stage, blocks in ((1, 2), (2, 11)) for block in range(blocks)]
    assert list(depths(stages).values()) == list(range(13))
    towers = [
        "vision_model.encoder.layers.0.x",
        "text_model.encoder.layers.0.x",
        "text_model.encoder.layers.10.x",
        "visual_projection.x",
    ]
    assert depths(towers) == dict(zip(towers, [2, 0, 1, None], strict=True))


# --- whole models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> model_zoo.Models:
    return model_zoo.bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def diagnosis(family: model_zoo.Models) -> Diagnosis:
    return acemerge.diagnose(family.base, family.experts)


def test_every_weight_that_experts_share_with_the_base_is_measured(family: model_zoo.Models, diagnosis: Diagnosis) -> None:
    plan = acemerge.merge(family.base, family.experts, family.base.parent / "merged", overwrite=True)
    fates = {record["name"]: record["action"] for record in plan.tensors}
    measured = {tensor.name: tensor.fate for tensor in diagnosis.tensors}
    assert measured.items() <= fates.items()
    assert {name for name, fate in fates.items() if fate == "merged"} == {tensor.name for tensor in diagnosis.matrices}
    assert any(
        tensor.kind == "embedding" and tensor.fate == "kept" and sum(tensor.entries.energies) for tensor in diagnosis.tensors
    )


def test_gamma_branch_ridge_and_lengths_are_those_of_the_merge(family: model_zoo.Models, diagnosis: Diagnosis) -> None:
    merged = acemerge.merge(family.base, family.experts, family.base.parent / "merged", overwrite=True)
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


def test_whole_model_methods_and_methods_without_a_core_are_compared_on_adapters_too(tmp_path: Path) -> None:
    zoo = lora_zoo.build(tmp_path, "GPT2LMHeadModel")
    found = acemerge.diagnose(zoo.base, zoo.adapters, candidates=["ties", "ace", "knots_ties"])
    for tensor in found.matrices:
        assert tensor.forecasts.keys() == {"ties", "ace", "knots_ties"}


def test_weights_that_are_a_list_can_be_forecast(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    found = acemerge.diagnose(base, experts, candidates=["linear:weights=1,0,normalise=false"])
    assert all(tensor.forecasts["linear:weights=1,0,normalise=false"].interference[0] == 0 for tensor in found.matrices)


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


# --- findings ----------------------------------------------------------------------------------------------------------


def said(base: Path, experts: list[Path], **options: object) -> str:
    found = findings(acemerge.diagnose(base, experts, **options))  # type: ignore[arg-type]
    return "\n".join(f"{finding.level}: {finding.text} {finding.advice}" for finding in found)


def test_models_of_another_origin_are_refused(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 1)
    generator = torch.Generator().manual_seed(7)
    stranger = {name: torch.randn(w.shape, generator=generator) for name, w in model_zoo.read_tensors(base).items()}
    experts.append(write_model(tmp_path / "stranger", stranger))
    diagnosis = acemerge.diagnose(base, experts)
    level, sentence = verdict(findings(diagnosis))
    assert (level, sentence) == ("stop", "Do not merge these as they are.")
    text = said(base, experts)
    assert "stop: Expert 'stranger' does not look like a fine-tune of this base" in text
    assert "'expert-0' does not look" not in text
    assert "good:" not in text


def test_good_experts_are_called_mergeable(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 3)
    level, _ = verdict(findings(acemerge.diagnose(base, experts, candidates=["average"])))
    assert level == "good"


def test_twins_opposites_idlers_and_giants_are_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 4)
    first, original = model_zoo.read_tensors(experts[0]), model_zoo.read_tensors(base)
    copies = {
        "twin": first,
        "opposite": {name: 2 * original[name] - w for name, w in first.items()},
        "idler": original,
        "giant": {name: original[name] + 5 * (w - original[name]) for name, w in model_zoo.read_tensors(experts[1]).items()},
    }
    experts = [*experts[:1], *experts[2:], *(write_model(tmp_path / name, tensors) for name, tensors in copies.items())]
    text = said(base, experts, candidates=["average"])
    assert "'expert-0' and 'twin' made nearly the same change" in text
    assert "'expert-0' and 'opposite' pull in opposite directions" in text
    assert "Expert 'idler' has not changed a single matrix" in text
    assert re.search(r"Expert 'giant' changed 2\d times as much", text)


def test_a_dominating_regulariser_is_named_with_a_remedy(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 2, strength=1e-4)
    text = said(base, experts)
    assert "8 of 8 matrices the regulariser outweighs" in text
    assert "-m ace:epsilon=1e-07" in text


def test_a_gamma_that_only_scale_makes_large_is_named(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"layers.0.mlp.up_proj.weight": torch.randn(16, 16, generator=generator)}
    folders = [write_model(tmp_path / "base", base)]
    for index, energy in enumerate((0.8, 1.2, 1.3)):
        change = torch.randn(16, 16, generator=generator)
        change *= math.sqrt(energy) / change.norm()
        folders.append(write_model(tmp_path / f"e{index}", {name: w + change for name, w in base.items()}))
    assert "In 1 of 1 matrices gamma is large because the experts' energies lie near 1" in said(folders[0], folders[1:])


def test_changes_in_column_means_are_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 1)
    shifted = {name: w + 0.05 for name, w in model_zoo.read_tensors(base).items()}
    experts.append(write_model(tmp_path / "shifted", shifted))
    assert "of the change of expert 'shifted' lies in column means" in said(base, experts)


def test_kept_tensors_that_an_expert_changed_are_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    tensors = model_zoo.read_tensors(experts[0])
    tensors["embed_tokens.weight"] *= 2
    model_zoo.write_tensors(experts[0], tensors)
    assert "Expert 'expert-0' changed 'embed_tokens.weight' by over 10%" in said(base, experts, preset="llm")


def test_low_rank_changes_are_named(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"layers.0.mlp.up_proj.weight": torch.randn(60, 60, generator=generator)}
    lora = {
        name: w + 0.1 * torch.randn(60, 2, generator=generator) @ torch.randn(2, 60, generator=generator)
        for name, w in base.items()
    }
    full = {name: w + 0.1 * torch.randn(60, 60, generator=generator) for name, w in base.items()}
    folders = [write_model(tmp_path / name, tensors) for name, tensors in (("base", base), ("lora", lora), ("full", full))]
    assert "The changes of expert 'lora' are carried by very few directions" in said(folders[0], folders[1:])


def test_one_expert_alone_can_be_diagnosed(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 1)
    found = acemerge.diagnose(base, experts)
    assert pairs(Summary(found).cosines) == []
    assert Summary(found).forecasts["average"] == pytest.approx(0, abs=1e-9)


# --- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("emr", "-m emr: makes one model per task"),
        ("regmean", "-m regmean: uses data, and a diagnosis looks at weights alone"),
        ("ase", "there is no method 'ase'"),
        ("ace:epsilon", "write it as KEY=VALUE"),
        ("ace:epsilom=1", "method 'ace' has no option 'epsilom'"),
    ],
)
def test_a_wrong_candidate_is_told_in_the_user_s_words(tmp_path: Path, candidate: str, message: str) -> None:
    base, experts = layered(tmp_path, 1, 1)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        acemerge.diagnose(base, experts, candidates=[candidate])


def test_nan_is_told_with_model_and_tensor(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    tensors = model_zoo.read_tensors(experts[1])
    tensors["layers.0.mlp.up_proj.weight"][0, 0] = math.nan
    model_zoo.write_tensors(experts[1], tensors)
    with pytest.raises(MergeError, match=r"layers.0.mlp.up_proj.weight.*expert-1.*1 NaN"):
        acemerge.diagnose(base, experts)


def test_entries_are_plain_values(diagnosis: Diagnosis) -> None:
    import json

    assert json.loads(json.dumps(diagnosis.to_json()))["experts"] == list(diagnosis.experts)
    assert isinstance(diagnosis.tensors[0].entries, Entries)
