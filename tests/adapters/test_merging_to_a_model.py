"""Adapters merged to a model: the same as from the models that peft expands them to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
import lora_zoo
from acemerge.methods import Method, get_method
from acemerge.output.task_models import export_expert
from adapter_merging import METHODS, Dense, assert_same_changes, assert_something_changed, check_against_expanded, loaded, merge
from lora_zoo import Zoo
from model_zoo import read_tensors, rewrite


@pytest.mark.parametrize("method", METHODS, ids=[m.name for m in METHODS])
def test_every_method_gives_the_merge_of_the_expanded_adapters(method: Method, llama: Zoo, tmp_path: Path) -> None:
    result = check_against_expanded(llama, method, tmp_path)
    routes = {record["route"] for record in result.tensors if "route" in record}
    sides = method.core_sides(method.options({}).resolve({}))
    assert all(route.startswith("core of rank ") for route in routes) if sides else routes == {"dense"}


@pytest.mark.parametrize("name", ["ace", "ties", "knots_ties"])
@pytest.mark.parametrize("model", ["GPT2LMHeadModel", "ViTModel"])
def test_conv1d_and_convolutions(model: str, name: str, zoos: dict[str, Zoo], tmp_path: Path) -> None:
    check_against_expanded(zoos[model], get_method(name), tmp_path)


@pytest.mark.parametrize("method", [m for m in METHODS if m.per_task], ids=[m.name for m in METHODS if m.per_task])
def test_methods_with_a_model_per_task(method: Method, llama: Zoo, tmp_path: Path) -> None:
    result = merge(llama, tmp_path / "out", method.name)
    rules = [{"match": tensor.name, "do": "keep"} for tensor in result.plan.tensors if not tensor.method]
    merge(llama, tmp_path / "expanded", method.name, llama.full, tensors=rules)
    for place in ("out", "expanded"):
        export_expert(tmp_path / place, "code", tmp_path / f"{place}-code")
    base, found = read_tensors(llama.base), read_tensors(tmp_path / "out-code")
    assert_same_changes(found, read_tensors(tmp_path / "expanded-code"), base)
    assert_something_changed(found, base)


def test_one_adapter_alone_is_expanded(llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", "task_arithmetic", {"math": llama.adapters["math"]}, alpha=1.0)
    assert_same_changes(read_tensors(tmp_path / "out"), read_tensors(llama.full["math"]), read_tensors(llama.base))


def test_tensors_that_no_adapter_changes_are_the_bases_bits(llama: Zoo, tmp_path: Path) -> None:
    result = merge(llama, tmp_path / "out")
    base, found = read_tensors(llama.base), read_tensors(tmp_path / "out")
    kept = [tensor.name for tensor in result.plan.tensors if tensor.reason == "no adapter changes it"]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(kept)
    assert all(found[name].equal(base[name]) for name in kept)
    assert result.plan.count("merged") == 14  # seven projections, two layers


def test_an_adapter_that_leaves_a_matrix_alone_has_no_opinion_on_it(llama: Zoo, tmp_path: Path) -> None:
    """Only `math` changes o_proj: ACE merges that one expert; averaging divides by all three."""
    ace = merge(llama, tmp_path / "ace")
    records = {record["name"]: record for record in ace.tensors}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert records[name]["active_experts"] == 1
    assert records[name]["experts"] == {"math": name, "code": None, "chat": None}
    merge(llama, tmp_path / "mean", "average")
    base, mean, full = (read_tensors(folder)[name] for folder in (llama.base, tmp_path / "mean", llama.full["math"]))
    torch.testing.assert_close(mean - base, (full - base) / 3, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["ace", "ties", "tsv_m", "average"])
def test_adapters_and_full_models_together(name: str, llama: Zoo, tmp_path: Path) -> None:
    mixed = {"math": llama.adapters["math"], "code": llama.full["code"], "chat": llama.adapters["chat"]}
    result = merge(llama, tmp_path / "mixed", name, mixed)
    merge(llama, tmp_path / "expanded", name, llama.full)
    base, found = read_tensors(llama.base), read_tensors(tmp_path / "mixed")
    assert_same_changes(found, read_tensors(tmp_path / "expanded"), base, 1e-4)
    assert_something_changed(found, base)
    assert {record["route"] for record in result.tensors if "route" in record} == {"dense"}


def test_dora_merges_as_a_whole_matrix(zoos: dict[str, Zoo], tmp_path: Path) -> None:
    loras: dict[str, dict[str, Any]] = {
        "dora": {"target_modules": ["c_attn"], "use_dora": True},
        "lora": {"target_modules": ["c_attn", "c_proj"], "strength": 0.3},
    }
    zoo = lora_zoo.build(tmp_path / "zoo", "GPT2LMHeadModel", loras)
    result = check_against_expanded(zoo, get_method("ace"), tmp_path)
    routes = {record["name"]: record.get("route") for record in result.tensors}
    assert routes["transformer.h.0.attn.c_attn.weight"] == "dense"
    assert routes["transformer.h.0.attn.c_proj.weight"] == "core of rank 4"


def test_biases_and_saved_modules_merge_as_values(tmp_path: Path) -> None:
    loras: dict[str, dict[str, Any]] = {
        "one": {"target_modules": ["c_attn"], "bias": "all"},
        "two": {"target_modules": ["c_attn"], "lora_bias": True, "strength": 0.3},
        "three": {"target_modules": ["c_fc"], "modules_to_save": ["wpe", "ln_f"]},
    }
    zoo = lora_zoo.build(tmp_path / "zoo", "GPT2LMHeadModel", loras)
    for name in ("average", "ace"):
        check_against_expanded(zoo, get_method(name), tmp_path / name)


def test_matrices_as_they_are_stored(zoos: dict[str, Zoo], tmp_path: Path) -> None:
    """Conv1D matrices merged as [in, out], which is another merge."""
    zoo = zoos["GPT2LMHeadModel"]
    merge(zoo, tmp_path / "canonical")
    result = merge(zoo, tmp_path / "stored", orientation="stored")
    rules = [{"match": tensor.name, "do": "keep"} for tensor in result.plan.tensors if not tensor.method]
    merge(zoo, tmp_path / "expanded", experts=zoo.full, orientation="stored", tensors=rules)
    merge(zoo, tmp_path / "adapter", orientation="stored", save_as="adapter")
    base, stored = read_tensors(zoo.base), read_tensors(tmp_path / "stored")
    assert_same_changes(stored, read_tensors(tmp_path / "expanded"), base)
    assert_same_changes(loaded(zoo, tmp_path / "adapter"), stored, base)
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.allclose(stored[name], read_tensors(tmp_path / "canonical")[name], atol=1e-4)


def test_rules_for_some_tensors(llama: Zoo, tmp_path: Path) -> None:
    """Another method, of another route, for some; others kept or averaged."""
    rules = [
        {"match": "*up_proj*", "method": "ties"},
        {"match": "*down_proj*", "do": "average"},
        {"match": "*k_proj*", "do": "keep"},
    ]
    result = merge(llama, tmp_path / "out", tensors=rules)
    routes = {record["name"].split(".")[-2]: record.get("route") for record in result.tensors if "layers.0" in record["name"]}
    assert routes["up_proj"] == "dense"
    assert routes["down_proj"] == "core of rank 3"
    assert routes["q_proj"] == "core of rank 6"
    assert routes["k_proj"] is None
    merge(llama, tmp_path / "expanded", experts=llama.full, tensors=rules)
    assert_same_changes(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "expanded"), read_tensors(llama.base))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GPT-2, whose output layer is its embedding: stored once, or under both names."""
    root = tmp_path_factory.mktemp("tied")
    once = lora_zoo.write_base(root / "once", "GPT2LMHeadModel")
    both = rewrite(once, root / "both", lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()})
    assert "lm_head.weight" not in read_tensors(once)
    config = json.loads((both / "config.json").read_text())
    (both / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    shutil.copyfile(both / "config.json", once / "config.json")
    return {"once": once, "both": both}


@pytest.mark.parametrize("stored", ["once", "both"])
def test_an_adapter_of_a_tied_output_layer_is_refused(stored: str, tied: dict[str, Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target_modules": ["lm_head", "c_attn"]}
    adapter = lora_zoo.write_adapter(tied["once"], tmp_path / "adapter", "GPT2LMHeadModel", **settings)
    with pytest.raises(
        acemerge.InputError, match=r"'lm_head.weight' \[40, 16\].*not in base.*tied to the embeddings.*merge_and_unload"
    ):
        acemerge.merge(tied[stored], [adapter], tmp_path / "out")


@pytest.mark.parametrize("stored", ["once", "both"])
def test_a_saved_output_layer_of_a_tied_base_is_the_experts_own(stored: str, tied: dict[str, Path], tmp_path: Path) -> None:
    """peft unties a saved output layer: it belongs to the expert, and its task's model is untied."""
    settings: dict[str, Any] = {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}
    adapter = lora_zoo.write_adapter(tied["once"], tmp_path / "own", "GPT2LMHeadModel", **settings)
    full = read_tensors(lora_zoo.expand(tied["once"], adapter, tmp_path / "full", "GPT2LMHeadModel"))
    acemerge.merge(tied[stored], [adapter], tmp_path / "out", "task_arithmetic", alpha=1.0)
    assert "lm_head.weight" not in read_tensors(tmp_path / "out")
    with lora_zoo.quiet():
        model = acemerge.load_expert_head(tmp_path / "out", "own").state_dict()
    assert all((model[name] - value).abs().max() < 1e-6 for name, value in full.items())
    assert not model["lm_head.weight"].equal(model["transformer.wte.weight"])
    assert json.loads((tmp_path / "out/heads/own/config.json").read_text())["tie_word_embeddings"] is False


def test_half_precision_outputs(llama: Zoo, dense: Dense, tmp_path: Path) -> None:
    merge(llama, tmp_path / "half", dtype="float16")
    whole, half = read_tensors(dense("ace")), read_tensors(tmp_path / "half")
    for name, value in whole.items():
        assert half[name].dtype == torch.float16
        torch.testing.assert_close(half[name].float(), value, atol=2e-6, rtol=2e-3)
