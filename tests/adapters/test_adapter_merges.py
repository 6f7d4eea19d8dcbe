"""Adapters merged end to end: the same model as from expanded adapters, or one adapter that peft loads as exactly that model."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import acemerge
import lora_zoo
from acemerge.execute import shard
from acemerge.execute.pipeline import MergeResult
from acemerge.methods import Method, all_methods, get_method
from acemerge.output.task_models import export_expert
from acemerge.output.verify import verify_output
from command import Command
from interruption import one_by_one, stop_at
from largest_result import LargestResult
from lora_zoo import Zoo
from model_zoo import Tensors, assert_equal_tensors, file_hashes, read_tensors, rewrite

METHODS = [m for m in all_methods() if m.uses == "weights"]  # the others run models, which an adapter is not: they refuse it


@pytest.fixture(scope="session")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Zoo]:
    return {name: lora_zoo.build(tmp_path_factory.mktemp(name), name) for name in lora_zoo.LORAS}


@pytest.fixture(scope="session")
def llama(zoos: dict[str, Zoo]) -> Zoo:
    return zoos["LlamaForCausalLM"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def merge(zoo: Zoo, output: Path, method: str = "ace", experts: Mapping[str, Path] | None = None, **settings: Any) -> MergeResult:
    return acemerge.merge(zoo.base, dict(experts or zoo.adapters), output, method, **settings)


def taken(method: Method, experts: Mapping[str, Path]) -> dict[str, Path]:
    """As many experts as the method takes."""
    return dict(list(experts.items())[: method.experts])


def assert_same_changes(found: Tensors, expected: Tensors, base: Tensors, tolerance: float = 1e-5) -> None:
    """Every tensor changed alike, up to a share of the change and what float32 rounds."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        change = (value - base[name]).double()
        rounding = 8 * torch.finfo(torch.float32).eps * float(value.abs().max())
        error = (found[name].double() - value.double()).abs().max()
        assert error <= tolerance * change.abs().max() + rounding, f"{name}: {error:.2e} of {change.abs().max():.2e}"


def assert_something_changed(found: Tensors, base: Tensors) -> None:
    assert any(not found[name].equal(base[name]) for name in base)


# --- a dense model -----------------------------------------------------------------------------------------------------


def check_against_expanded(zoo: Zoo, method: Method, tmp_path: Path) -> MergeResult:
    result = merge(zoo, tmp_path / "out", method.name, taken(method, zoo.adapters))
    # Shares and norms over a whole model are counted over what adapters change: so must those of the expanded ones be.
    rules = [{"match": tensor.name, "do": "keep"} for tensor in result.plan.tensors if not tensor.method]
    merge(zoo, tmp_path / "expanded", method.name, taken(method, zoo.full), tensors=rules)
    base, found = read_tensors(zoo.base), read_tensors(tmp_path / "out")
    assert_same_changes(found, read_tensors(tmp_path / "expanded"), base)
    assert method.per_task or any(not found[name].equal(base[name]) for name in base)
    return result


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


def test_half_precision_outputs(llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "whole")
    merge(llama, tmp_path / "half", dtype="float16")
    whole, half = read_tensors(tmp_path / "whole"), read_tensors(tmp_path / "half")
    for name, value in whole.items():
        assert half[name].dtype == torch.float16
        torch.testing.assert_close(half[name].float(), value, atol=2e-6, rtol=2e-3)


# --- one adapter -------------------------------------------------------------------------------------------------------


def loaded(zoo: Zoo, adapter: Path) -> Tensors:
    """The model that peft makes of base and adapter, as it is stored; a warning is an error."""
    folder = adapter.parent / f"{adapter.name}-loaded"
    model = lora_zoo.load(zoo.base, zoo.class_name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = peft.PeftModel.from_pretrained(model, str(adapter))
    assert not [str(w.message) for w in caught if "Missing" in str(w.message) or "adapter" in str(w.message)]
    with lora_zoo.quiet():
        wrapped.merge_and_unload().save_pretrained(folder)
    return read_tensors(folder)


@pytest.mark.parametrize("name", ["ace", "average", "cart", "core_space", "iso_c", "knots_ties", "tsv_m"])
def test_an_adapter_is_the_dense_output(name: str, llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "dense", name)
    result = merge(llama, tmp_path / "adapter", name, save_as="adapter")
    assert_same_changes(loaded(llama, tmp_path / "adapter"), read_tensors(tmp_path / "dense"), read_tensors(llama.base))
    assert {record["written"] for record in result.tensors} == {"factors", "absent"}
    assert max(record["relative_error"] for record in result.tensors if "relative_error" in record) < 2e-7  # of float32 itself


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_error_is_that_of_the_factors_on_disk(llama: Zoo, tmp_path: Path, dtype: str, rank: int | None) -> None:
    merge(llama, tmp_path / "dense", "ace")
    merge(llama, tmp_path / "adapter", "ace", save_as="adapter", dtype=dtype, rank=rank)
    base, dense = read_tensors(llama.base), read_tensors(tmp_path / "dense")
    factors = read_tensors(tmp_path / "adapter")
    records = json.loads((tmp_path / "adapter/acemerge_manifest.json").read_text())["tensors"]
    written = [record for record in records if record["written"] == "factors"]
    assert len(written) > 5
    for record in written:
        module = f"base_model.model.{record['name'].removesuffix('.weight')}"
        found = factors[f"{module}.lora_B.weight"].double() @ factors[f"{module}.lora_A.weight"].double()
        exact = dense[record["name"]].double() - base[record["name"]].double()
        error = float((found - exact).norm() / exact.norm())
        # The dense output's own rounding, of weights ten to a hundred times as large as their change, shows at 1e-5.
        assert record["relative_error"] == pytest.approx(error, rel=0.02, abs=1e-5)


@pytest.mark.parametrize("model", ["GPT2LMHeadModel", "ViTModel"])
@pytest.mark.parametrize("name", ["ace", "task_arithmetic"])
def test_adapters_with_conv1d_and_convolutions(model: str, name: str, zoos: dict[str, Zoo], tmp_path: Path) -> None:
    zoo = zoos[model]
    merge(zoo, tmp_path / "dense", name)
    merge(zoo, tmp_path / "adapter", name, save_as="adapter")
    assert_same_changes(loaded(zoo, tmp_path / "adapter"), read_tensors(tmp_path / "dense"), read_tensors(zoo.base))
    assert lora_zoo.read_settings(tmp_path / "adapter")["fan_in_fan_out"] == (model == "GPT2LMHeadModel")


@pytest.mark.parametrize("name", ["ties", "dare_ties"])
def test_methods_without_a_core_need_a_rank(name: str, llama: Zoo, tmp_path: Path) -> None:
    """At full rank nothing is lost, so the adapter is the dense output."""
    with pytest.raises(acemerge.InputError, match=r"merged as whole matrices.*give --rank R"):
        merge(llama, tmp_path / "adapter", name, save_as="adapter")
    merge(llama, tmp_path / "dense", name)
    result = merge(llama, tmp_path / "adapter", name, save_as="adapter", rank=99)
    assert_same_changes(loaded(llama, tmp_path / "adapter"), read_tensors(tmp_path / "dense"), read_tensors(llama.base))
    assert max(record["relative_error"] for record in result.tensors if "relative_error" in record) < 1e-6


@pytest.mark.parametrize("name", ["ace", "ties"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_smaller_rank_is_the_nearest_and_its_error_is_told(
    name: str, rank: int, llama: Zoo, tmp_path: Path, command: Command
) -> None:
    """Eckart and Young, by numpy: the leading singular triples of the dense merge."""
    merge(llama, tmp_path / "dense", name)
    arguments = [
        llama.base,
        *llama.adapters.values(),
        "-o",
        tmp_path / "adapter",
        "-m",
        name,
        "--as",
        "adapter",
        "--rank",
        rank,
        "-v",
    ]
    code, out, err = command("merge", *arguments)
    assert code == 0, err
    assert "relative error" in out.splitlines()[1]  # a column of the table
    base, dense, found = (read_tensors(f) for f in (llama.base, tmp_path / "dense", llama.base))
    found = loaded(llama, tmp_path / "adapter")
    records = json.loads((tmp_path / "adapter/acemerge_manifest.json").read_text())["tensors"]
    lost, total = 0.0, 0.0
    for record in records:
        if record["written"] == "absent":
            continue
        M = (dense[record["name"]].double() - base[record["name"]].double()).numpy()
        U, s, Vt = np.linalg.svd(M, full_matrices=False)
        nearest = torch.from_numpy((U[:, :rank] * s[:rank]) @ Vt[:rank])
        change = found[record["name"]].double() - base[record["name"]].double()
        assert (change - nearest).norm() <= 1e-5 * np.linalg.norm(s), record["name"]
        tail = float(np.sqrt((s[rank:] ** 2).sum() / (s**2).sum()))
        assert record["relative_error"] == pytest.approx(tail, abs=1e-5)
        assert record["rank"] <= rank
        lost, total = lost + float((s[rank:] ** 2).sum()), total + float((s**2).sum())
    overall = (lost / total) ** 0.5
    assert overall > 0.01  # there is something to lose
    told = re.search(r"relative error (\S+) over all tensors", out)
    assert told
    assert float(told[1]) == pytest.approx(overall, rel=1e-2)
    assert f"of rank {rank} at most" in out


def test_exact_ranks_are_written(tmp_path: Path) -> None:
    """Experts with one A in common make an adapter of A's rank, not of the sum of their ranks."""
    loras = {n: {"r": 3, "target_modules": ["q_proj", "up_proj"]} for n in ("one", "two", "three")}
    zoo = lora_zoo.build(tmp_path / "zoo", "LlamaForCausalLM", loras)
    shared = {name: value for name, value in lora_zoo.read_factors(zoo.adapters["one"]).items() if "lora_A" in name}
    for adapter in zoo.adapters.values():
        lora_zoo.write_factors(adapter, {**lora_zoo.read_factors(adapter), **shared})
    result = merge(zoo, tmp_path / "mean", "average", save_as="adapter")
    assert {record["rank"] for record in result.tensors if "rank" in record} == {3}
    assert lora_zoo.read_settings(tmp_path / "mean")["r"] == 3
    merge(zoo, tmp_path / "dense", "ace")
    result = merge(zoo, tmp_path / "ace", "ace", save_as="adapter")
    assert {record["rank"] for record in result.tensors if "rank" in record} == {3}
    assert_same_changes(loaded(zoo, tmp_path / "ace"), read_tensors(tmp_path / "dense"), read_tensors(zoo.base))


def test_settings_that_peft_reads(llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", "task_arithmetic", save_as="adapter")
    settings, factors = lora_zoo.read_settings(tmp_path / "out"), lora_zoo.read_factors(tmp_path / "out")
    ranks = {
        n.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): len(f) for n, f in factors.items() if "lora_A" in n
    }
    assert ranks["model.layers.0.self_attn.q_proj"] == 2 + 3 + 1
    assert ranks["model.layers.0.self_attn.o_proj"] == 2
    assert settings["r"] == settings["lora_alpha"] == 6
    assert settings["rank_pattern"] == {module: rank for module, rank in sorted(ranks.items()) if rank != 6}
    assert settings["alpha_pattern"] == settings["rank_pattern"]
    assert settings["target_modules"] == sorted(ranks)
    assert settings["modules_to_save"] is None
    assert settings["base_model_name_or_path"] is None  # a folder of this machine says nothing elsewhere
    with lora_zoo.quiet():
        config = peft.LoraConfig.from_pretrained(str(tmp_path / "out"))
    assert config.peft_type == "LORA"


def test_a_merged_adapter_is_an_expert_again(llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", save_as="adapter")
    merge(llama, tmp_path / "dense")
    merge(llama, tmp_path / "again", "task_arithmetic", {"merged": tmp_path / "out"}, alpha=1.0)
    assert_same_changes(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "dense"), read_tensors(llama.base))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_adapters_of_other_precisions(dtype: str, llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "dense")
    merge(llama, tmp_path / "out", save_as="adapter", dtype=dtype)
    assert {value.dtype for value in lora_zoo.read_factors(tmp_path / "out").values()} == {getattr(torch, dtype)}
    tolerance = {"float16": 5e-3, "bfloat16": 4e-2, "float64": 1e-5}[dtype]
    found = loaded(llama, tmp_path / "out")
    assert_same_changes(found, read_tensors(tmp_path / "dense"), read_tensors(llama.base), tolerance)


def test_embeddings_and_saved_modules_in_an_adapter(tmp_path: Path) -> None:
    loras: dict[str, dict[str, Any]] = {
        "one": {"r": 2, "target_modules": ["wte", "c_attn"], "modules_to_save": ["ln_f"]},
        "two": {"r": 3, "target_modules": ["wte", "c_attn", "c_fc"], "strength": 0.3},
        "three": {"r": 1, "target_modules": ["c_attn"], "modules_to_save": ["wpe", "ln_f"]},
    }
    zoo = lora_zoo.build(tmp_path / "zoo", "GPT2LMHeadModel", loras)
    for name in ("task_arithmetic", "ace"):
        merge(zoo, tmp_path / f"dense-{name}", name)
        result = merge(zoo, tmp_path / name, name, save_as="adapter")
        assert_same_changes(loaded(zoo, tmp_path / name), read_tensors(tmp_path / f"dense-{name}"), read_tensors(zoo.base))
        written = {record["name"]: record["written"] for record in result.tensors}
        assert written["transformer.wte.weight"] == "factors"
        assert {written[f"transformer.{n}"] for n in ("wpe.weight", "ln_f.weight", "ln_f.bias")} == {"value"}
        assert written["transformer.h.0.ln_1.weight"] == "absent"
        assert lora_zoo.read_settings(tmp_path / name)["modules_to_save"] == ["transformer.ln_f", "transformer.wpe"]
        assert any(key.endswith("wte.lora_embedding_A") for key in lora_zoo.read_factors(tmp_path / name))


def test_adapters_without_any_change(llama: Zoo, tmp_path: Path) -> None:
    """All factors B are zero, as peft initialises them: the base, and no adapter that peft could load."""
    untrained = {
        name: lora_zoo.copy_adapter(adapter, tmp_path / name, lambda f: {n: t * 0 if "lora_B" in n else t for n, t in f.items()})
        for name, adapter in llama.adapters.items()
    }
    merge(llama, tmp_path / "dense", experts=untrained)
    assert_equal_tensors(read_tensors(tmp_path / "dense"), read_tensors(llama.base))
    with pytest.raises(acemerge.MergeError, match=r"no adapter changes any matrix.*leave out --as adapter"):
        merge(llama, tmp_path / "adapter", experts=untrained, save_as="adapter")
    assert not (tmp_path / "adapter").exists()


def test_one_matrix_without_any_change(llama: Zoo, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    partly = {
        name: lora_zoo.copy_adapter(
            adapter, tmp_path / name, lambda f: {n: t * 0 if f"{module}.lora_B" in n else t for n, t in f.items()}
        )
        for name, adapter in llama.adapters.items()
    }
    merge(llama, tmp_path / "dense", experts=partly)
    merge(llama, tmp_path / "adapter", experts=partly, save_as="adapter")
    assert module not in lora_zoo.read_settings(tmp_path / "adapter")["target_modules"]
    found, base = loaded(llama, tmp_path / "adapter"), read_tensors(llama.base)
    assert found[f"{module}.weight"].equal(base[f"{module}.weight"])
    assert_same_changes(found, read_tensors(tmp_path / "dense"), base)


def test_saved_modules_alone_are_no_adapter(tmp_path: Path) -> None:
    zoo = lora_zoo.build(
        tmp_path / "zoo", "LlamaForCausalLM", {"one": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}}
    )
    only_norm = lora_zoo.copy_adapter(
        zoo.adapters["one"], tmp_path / "norm", lambda f: {n: t for n, t in f.items() if "lora" not in n}
    )
    with pytest.raises(acemerge.InputError, match="no expert changes a matrix that merges by low-rank factors"):
        merge(zoo, tmp_path / "out", "average", {"norm": only_norm}, save_as="adapter")
    merge(zoo, tmp_path / "out", "average", {"norm": only_norm})
    assert_something_changed(read_tensors(tmp_path / "out"), read_tensors(zoo.base))


# --- what an adapter cannot hold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["FULL", "--as", "adapter"], "is a full model, not an adapter"),
        (["--as", "adapter", "-m", "ties"], "14 tensors, such as 'model.layers.0.mlp.down_proj.weight', are merged as whole"),
        (["--as", "adapter", "-m", "emr"], "'emr' makes one model per task, which one adapter cannot hold"),
        (["--as", "adapter", "-m", "emr", "--rank", "4"], "'emr' makes one model per task"),
        (["--rank", "4"], "only an adapter has one"),
        (["--as", "adapter", "--rank", "0"], "greater than or equal to 1"),
        (["--as", "lora"], "'model' or 'adapter'"),
    ],
)
def test_refusals(arguments: list[str], says: str, llama: Zoo, tmp_path: Path, command: Command) -> None:
    given = [str(llama.full["math"]) if argument == "FULL" else argument for argument in arguments]
    for verb in (["merge", "-o", tmp_path / "out"], ["plan"]):
        code, out, err = command(*verb, llama.base, *llama.adapters.values(), *given)
        assert code == 2
        assert says in err, err
        assert out == ""
        assert not list(tmp_path.iterdir())


def test_dora_in_an_adapter_needs_a_rank(tmp_path: Path) -> None:
    loras: dict[str, dict[str, Any]] = {
        "dora": {"target_modules": ["q_proj"], "use_dora": True},
        "lora": {"target_modules": ["q_proj", "up_proj"]},
    }
    zoo = lora_zoo.build(tmp_path / "zoo", "LlamaForCausalLM", loras)
    with pytest.raises(acemerge.InputError, match=r"2 tensors.*q_proj.*DoRA adapters.*give --rank R"):
        merge(zoo, tmp_path / "out", save_as="adapter")
    merge(zoo, tmp_path / "dense")
    merge(zoo, tmp_path / "out", save_as="adapter", rank=16)
    assert_same_changes(loaded(zoo, tmp_path / "out"), read_tensors(tmp_path / "dense"), read_tensors(zoo.base))


@pytest.mark.parametrize("settings", [{"bias": "lora_only"}, {"lora_bias": True}])
def test_low_rank_changes_and_biases_of_one_module(settings: dict[str, Any], tmp_path: Path) -> None:
    loras = {name: {"target_modules": ["c_attn"], **settings} for name in ("one", "two")}
    zoo = lora_zoo.build(tmp_path / "zoo", "GPT2LMHeadModel", loras)
    with pytest.raises(acemerge.InputError, match=r"such as 'transformer.h.0.attn.c_attn'.*\{match: '\*bias', do: keep\}"):
        merge(zoo, tmp_path / "out", save_as="adapter")
    rules = [{"match": "*bias", "do": "keep"}]
    merge(zoo, tmp_path / "dense", tensors=rules)
    merge(zoo, tmp_path / "out", save_as="adapter", tensors=rules)  # what the message advises
    assert_same_changes(loaded(zoo, tmp_path / "out"), read_tensors(tmp_path / "dense"), read_tensors(zoo.base))


# --- heads -------------------------------------------------------------------------------------------------------------

_HEADS = {
    "BertForSequenceClassification": ("BertModel", ["query", "value"]),
    "RobertaForSequenceClassification": ("RobertaForMaskedLM", ["query", "dense"]),
    "GPT2ForSequenceClassification": ("GPT2LMHeadModel", ["c_attn"]),
    "ViTForImageClassification": ("ViTModel", ["q_proj"]),
}
LABELS = {"red": 3, "green": 5}


@pytest.mark.parametrize("class_name", _HEADS)
def test_heads_of_adapters(class_name: str, tmp_path: Path) -> None:
    """Classifiers with heads of their own: any task's model from the dense output, and from the adapter output."""
    base_class, targets = _HEADS[class_name]
    base = lora_zoo.write_base(tmp_path / "base", base_class)
    adapters, full = {}, {}
    saved: dict[str, Any] = {"modules_to_save": ["classifier"]} if class_name.startswith("ViT") else {"task_type": "SEQ_CLS"}
    for seed, (name, labels) in enumerate(LABELS.items(), 1):
        settings = {"r": seed + 1, "target_modules": targets, **saved}
        adapters[name] = lora_zoo.write_adapter(base, tmp_path / name, class_name, seed=seed, labels=labels, **settings)
        full[name] = lora_zoo.expand(base, adapters[name], tmp_path / "full" / name, class_name, labels)
    acemerge.merge(base, adapters, tmp_path / "dense")
    acemerge.merge(base, adapters, tmp_path / "adapter", save_as="adapter")
    acemerge.merge(base, full, tmp_path / "expanded")
    for name, labels in LABELS.items():
        model = acemerge.load_expert_head(tmp_path / "dense", name)
        expected = acemerge.load_expert_head(tmp_path / "expanded", name).state_dict()
        assert type(model).__name__ == class_name
        assert model.config.num_labels == labels
        found = model.state_dict()
        assert all((found[key] - expected[key]).abs().max() < 1e-5 for key in expected)
        export_expert(tmp_path / "dense", name, tmp_path / f"dense-{name}")
        with lora_zoo.quiet():
            again = lora_zoo.load(tmp_path / f"dense-{name}", class_name).state_dict()
        assert all(again[key].equal(found[key]) for key in found)
        export_expert(tmp_path / "adapter", name, tmp_path / f"adapter-{name}")
        with lora_zoo.quiet():
            wrapped = lora_zoo.peft_model(base, tmp_path / f"adapter-{name}", class_name, labels).merge_and_unload()
        task = wrapped.state_dict()
        assert all((task[key] - found[key]).abs().max() < 1e-5 for key in found if "pooler" not in key)
        heads = [key for key in found if "classifier" in key or "score" in key]
        assert heads
        assert all(task[key].equal(found[key]) for key in heads)
    for output in ("dense", "adapter", "dense-red", "adapter-green"):
        assert not verify_output(tmp_path / output).problems


def test_task_on_an_adapter_output(llama: Zoo, tmp_path: Path, command: Command) -> None:
    merge(llama, tmp_path / "out", save_as="adapter")
    code, _, err = command("task", tmp_path / "out", "math", "-o", tmp_path / "math")
    assert code == 2
    assert "holds no heads; the merged adapter itself serves every task" in err
    with pytest.raises(acemerge.InputError, match="an adapter, not a model; `acemerge task`"):
        acemerge.load_expert_head(tmp_path / "out", "math")
    assert not (tmp_path / "math").exists()


# --- the folder --------------------------------------------------------------------------------------------------------


def test_plan_says_which_route(llama: Zoo, command: Command) -> None:
    models = [llama.base, *llama.adapters.values()]
    code, out, _ = command("plan", *models)
    assert code == 0
    assert "in a core of rank 6" in out
    assert "14 tensors merge in the adapters' common core, of rank 6 at most" in out
    _, out, _ = command("plan", *models, "-m", "ties")
    assert "14 as whole tensors, one at a time" in out
    routes = {t["route"] for t in json.loads(command("plan", *models, "--json")[1])["tensors"] if "route" in t}
    assert routes == {f"core of rank {rank}" for rank in (2, 3, 5, 6)}
    _, out, _ = command("plan", *models, "--as", "adapter", "--json")
    assert json.loads(out)["saved_as"] == "adapter"
    assert json.loads(out)["totals"]["output_bytes"] < 40_000  # factors, not the model


@pytest.mark.parametrize("save_as", ["model", "adapter"])
def test_the_same_bytes_twice_and_inputs_untouched(save_as: str, llama: Zoo, tmp_path: Path) -> None:
    before = [file_hashes(folder) for folder in llama.folders]
    for name in ("one", "two"):
        merge(llama, tmp_path / name, save_as=save_as)
    assert file_hashes(tmp_path / "one") == file_hashes(tmp_path / "two")
    assert [file_hashes(folder) for folder in llama.folders] == before


@pytest.mark.parametrize("save_as", ["model", "adapter"])
def test_verify(save_as: str, llama: Zoo, tmp_path: Path, command: Command) -> None:
    merge(llama, tmp_path / "out", save_as=save_as)
    code, out, _ = command("verify", tmp_path / "out")
    assert code == 0
    assert "whole" in out
    weights = tmp_path / "out" / ("model.safetensors" if save_as == "model" else "adapter_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = command("verify", tmp_path / "out")
    assert code == 1
    assert f"{weights.name}: its content has changed" in err


def test_the_written_recipe_makes_the_same_adapter(llama: Zoo, tmp_path: Path, command: Command) -> None:
    merge(llama, tmp_path / "out", save_as="adapter", rank=2)
    recipe = llama.base.parent / "again.yaml"  # beside the models, whose names it uses
    shutil.copyfile(tmp_path / "out/acemerge.yaml", recipe)
    code, _, err = command("merge", recipe, "-o", tmp_path / "again")
    assert code == 0, err
    assert file_hashes(tmp_path / "again") == file_hashes(tmp_path / "out")


def test_overwrite_turns_a_model_into_an_adapter_and_back(llama: Zoo, tmp_path: Path) -> None:
    merge(llama, tmp_path / "model")
    merge(llama, tmp_path / "adapter", save_as="adapter")
    merge(llama, tmp_path / "out")
    with pytest.raises(acemerge.InputError, match="already exists"):
        merge(llama, tmp_path / "out", save_as="adapter")
    merge(llama, tmp_path / "out", save_as="adapter", overwrite=True)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "adapter")
    merge(llama, tmp_path / "out", overwrite=True)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "model")


def test_an_output_that_is_an_input_is_refused(llama: Zoo, tmp_path: Path) -> None:
    math = shutil.copytree(llama.adapters["math"], tmp_path / "math")
    before = file_hashes(math)
    with pytest.raises(acemerge.InputError):
        merge(llama, math, experts={"math": math, "code": llama.adapters["code"]}, overwrite=True)
    assert file_hashes(math) == before


def test_an_interrupted_merge_of_adapters_goes_on(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge(llama, tmp_path / "whole", shard_size=4000)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("model.layers.1.mlp.gate_proj.weight", calls)))
        with pytest.raises(KeyboardInterrupt):
            merge(llama, tmp_path / "out", shard_size=4000)
    assert not (tmp_path / "out").exists()
    again: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("nothing", again)))
        merge(llama, tmp_path / "out", shard_size=4000)
    assert 0 < len(again) < len(read_tensors(llama.base))  # finished shards are not done again
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "whole")


def test_a_changed_adapter_starts_over(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {name: shutil.copytree(adapter, tmp_path / name) for name, adapter in llama.adapters.items()}
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("model.layers.1.mlp.gate_proj.weight", [])))
        with pytest.raises(KeyboardInterrupt):
            merge(llama, tmp_path / "out", experts=experts, shard_size=4000)
    lora_zoo.change_settings(experts["math"], lora_alpha=16)  # twice the scale; the weights' file is the same
    merge(llama, tmp_path / "out", experts=experts, shard_size=4000)
    merge(llama, tmp_path / "fresh", experts=experts, shard_size=4000)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_an_interrupted_adapter_output(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("acemerge.execute.shard.merge_to_factors_at_points", interrupted)
        with pytest.raises(KeyboardInterrupt):
            merge(llama, tmp_path / "out", save_as="adapter")
    assert not (tmp_path / "out").exists()
    merge(llama, tmp_path / "out", save_as="adapter")
    merge(llama, tmp_path / "fresh", save_as="adapter")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


# --- memory ------------------------------------------------------------------------------------------------------------


def wide_models(root: Path, rank: int = 4) -> tuple[Path, dict[str, Path]]:
    """One layer far larger than its adapters, without transformers."""
    shapes = {"up": (900, 700), "down": (700, 900), "square": (800, 800)}
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    (root / "base").mkdir(parents=True)
    save_file({f"layers.0.{n}.weight": noise(*s) for n, s in shapes.items()}, root / "base/model.safetensors")
    adapters = {}
    for name in ("one", "two", "three"):
        adapters[name] = root / name
        adapters[name].mkdir()
        modules = {f"base_model.model.layers.0.{n}": s for n, s in shapes.items()}
        A = {f"{module}.lora_A.weight": noise(rank, columns) for module, (_, columns) in modules.items()}
        B = {f"{module}.lora_B.weight": noise(rows, rank) for module, (rows, _) in modules.items()}
        lora_zoo.write_factors(adapters[name], {**A, **B})
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(shapes)}
        (adapters[name] / "adapter_config.json").write_text(json.dumps(settings))
    return root / "base", adapters


@pytest.mark.parametrize("name", ["ace", "tsv_m"])
@pytest.mark.parametrize("rank", [None, 2])
def test_no_whole_matrix_is_made_for_an_adapter(name: str, rank: int | None, tmp_path: Path) -> None:
    base, adapters = wide_models(tmp_path)
    with LargestResult() as record:
        acemerge.merge(base, adapters, tmp_path / "adapter", name, save_as="adapter", rank=rank)
    assert 0 < record.largest <= 900 * (3 * 4 + 1)
    with LargestResult() as record:
        acemerge.merge(base, adapters, tmp_path / "dense", name)
    assert record.largest >= 700 * 900  # the record sees such matrices where there are any
