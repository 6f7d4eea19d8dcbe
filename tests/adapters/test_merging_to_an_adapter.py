"""Adapters merged to one adapter, which peft loads as exactly the dense output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import acemerge
import lora_zoo
from adapter_merging import Dense, assert_same_changes, assert_something_changed, loaded, merge
from command import Command
from lora_zoo import Zoo
from model_zoo import assert_equal_tensors, read_tensors


@pytest.mark.parametrize("name", ["ace", "average", "cart", "core_space", "iso_c", "knots_ties", "tsv_m"])
def test_an_adapter_is_the_dense_output(name: str, llama: Zoo, dense: Dense, tmp_path: Path) -> None:
    result = merge(llama, tmp_path / "adapter", name, save_as="adapter")
    assert_same_changes(loaded(llama, tmp_path / "adapter"), read_tensors(dense(name)), read_tensors(llama.base))
    assert {record["written"] for record in result.tensors} == {"factors", "absent"}
    assert max(record["relative_error"] for record in result.tensors if "relative_error" in record) < 2e-7  # of float32 itself


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_error_is_that_of_the_factors_on_disk(llama: Zoo, dense: Dense, tmp_path: Path, dtype: str, rank: int | None) -> None:
    merge(llama, tmp_path / "adapter", "ace", save_as="adapter", dtype=dtype, rank=rank)
    base, whole = read_tensors(llama.base), read_tensors(dense("ace"))
    factors = read_tensors(tmp_path / "adapter")
    records = json.loads((tmp_path / "adapter/acemerge_manifest.json").read_text())["tensors"]
    written = [record for record in records if record["written"] == "factors"]
    assert len(written) > 5
    for record in written:
        module = f"base_model.model.{record['name'].removesuffix('.weight')}"
        found = factors[f"{module}.lora_B.weight"].double() @ factors[f"{module}.lora_A.weight"].double()
        exact = whole[record["name"]].double() - base[record["name"]].double()
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
def test_methods_without_a_core_need_a_rank(name: str, llama: Zoo, dense: Dense, tmp_path: Path) -> None:
    """At full rank nothing is lost, so the adapter is the dense output."""
    with pytest.raises(acemerge.InputError, match=r"merged as whole matrices.*give --rank R"):
        merge(llama, tmp_path / "adapter", name, save_as="adapter")
    result = merge(llama, tmp_path / "adapter", name, save_as="adapter", rank=99)
    assert_same_changes(loaded(llama, tmp_path / "adapter"), read_tensors(dense(name)), read_tensors(llama.base))
    assert max(record["relative_error"] for record in result.tensors if "relative_error" in record) < 1e-6


@pytest.mark.parametrize("name", ["ace", "ties"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_smaller_rank_is_the_nearest_and_its_error_is_told(
    name: str, rank: int, llama: Zoo, dense: Dense, tmp_path: Path, command: Command
) -> None:
    """Eckart and Young, by numpy: the leading singular triples of the dense merge."""
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
    base, whole = read_tensors(llama.base), read_tensors(dense(name))
    found = loaded(llama, tmp_path / "adapter")
    records = json.loads((tmp_path / "adapter/acemerge_manifest.json").read_text())["tensors"]
    lost, total = 0.0, 0.0
    for record in records:
        if record["written"] == "absent":
            continue
        M = (whole[record["name"]].double() - base[record["name"]].double()).numpy()
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
    assert settings["base_model_name_or_path"] == "base"  # the folder's name; its path says nothing elsewhere
    with lora_zoo.quiet():
        config = peft.LoraConfig.from_pretrained(str(tmp_path / "out"))
    assert config.peft_type == "LORA"


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("org/model-7b", "org/model-7b"),
        (None, "base"),
        ("/home/somebody/base", "base"),
        ("../base", "base"),
        ("./runs/base", "base"),
        ("C:\\models\\base", "base"),
        ("", "base"),
    ],
)
def test_the_base_that_peft_is_told(said: str | None, written: str, llama: Zoo, tmp_path: Path) -> None:
    """A hub id where one is known; never null, which peft takes for a model called None, and never a path."""
    experts = {name: lora_zoo.copy_adapter(adapter, tmp_path / name) for name, adapter in llama.adapters.items()}
    for expert in experts.values():
        lora_zoo.change_settings(expert, base_model_name_or_path=said)
    merge(llama, tmp_path / "out", "average", experts, save_as="adapter")
    assert lora_zoo.read_settings(tmp_path / "out")["base_model_name_or_path"] == written


def test_auto_peft_model_finds_a_base_of_that_name(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {name: lora_zoo.copy_adapter(adapter, tmp_path / name) for name, adapter in llama.adapters.items()}
    for expert in experts.values():
        lora_zoo.change_settings(expert, task_type="CAUSAL_LM", base_model_name_or_path=None)
    merge(llama, tmp_path / "out", "average", experts, save_as="adapter")
    monkeypatch.chdir(llama.base.parent)
    with lora_zoo.quiet():
        model = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    found = model.merge_and_unload().state_dict()
    assert_equal_tensors(found, loaded(llama, tmp_path / "out"))


def test_a_merged_adapter_is_an_expert_again(llama: Zoo, dense: Dense, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", save_as="adapter")
    merge(llama, tmp_path / "again", "task_arithmetic", {"merged": tmp_path / "out"}, alpha=1.0)
    assert_same_changes(read_tensors(tmp_path / "again"), read_tensors(dense("ace")), read_tensors(llama.base))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_adapters_of_other_precisions(dtype: str, llama: Zoo, dense: Dense, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", save_as="adapter", dtype=dtype)
    assert {value.dtype for value in lora_zoo.read_factors(tmp_path / "out").values()} == {getattr(torch, dtype)}
    tolerance = {"float16": 5e-3, "bfloat16": 4e-2, "float64": 1e-5}[dtype]
    found = loaded(llama, tmp_path / "out")
    assert_same_changes(found, read_tensors(dense("ace")), read_tensors(llama.base), tolerance)


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


@pytest.fixture(scope="session")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A language model's adapters, one of which has trained the vocabulary too."""
    loras: dict[str, dict[str, Any]] = {
        "chat": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        "code": {"r": 2, "target_modules": ["q_proj"]},
    }
    return lora_zoo.build(tmp_path_factory.mktemp("saving"), "LlamaForCausalLM", loras)


@pytest.mark.parametrize("save_as", ["adapter", "model"])
def test_saved_modules_that_stay_at_the_base_are_named(save_as: str, saving: Zoo, tmp_path: Path, command: Command) -> None:
    code, out, err = command(
        "merge", saving.base, *saving.adapters.values(), "-m", "ace", "-o", tmp_path / "out", "--as", save_as
    )
    assert code == 0, err
    notes = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())["notes"]
    assert notes == [
        "what 'chat' changed of 'lm_head.weight', 'model.embed_tokens.weight' is left out: preset 'llm' leaves it at the base; "
        "a recipe rule such as {match: 'lm_head.weight', do: average} takes it in"
    ]
    assert f"note: {notes[0]}" in out.replace("\n", " ")
    assert "nothing left out" not in out


def test_saved_modules_that_a_rule_takes_in_are_saved_modules_again(saving: Zoo, tmp_path: Path) -> None:
    """What the note advises."""
    rules = [{"match": name, "do": "average"} for name in ("*lm_head*", "*embed_tokens*")]
    result = merge(saving, tmp_path / "out", save_as="adapter", tensors=rules)
    assert not result.plan.notes
    merge(saving, tmp_path / "dense", tensors=rules)
    found, base = loaded(saving, tmp_path / "out"), read_tensors(saving.base)
    assert lora_zoo.read_settings(tmp_path / "out")["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    assert_same_changes(found, read_tensors(tmp_path / "dense"), base)
    assert not found["lm_head.weight"].equal(base["lm_head.weight"])


def test_what_a_rule_keeps_has_no_note(saving: Zoo, tmp_path: Path) -> None:
    rules = [{"match": name, "do": "keep"} for name in ("*lm_head*", "*embed_tokens*")]
    assert not merge(saving, tmp_path / "out", save_as="adapter", tensors=rules).plan.notes


def test_adapters_without_any_change(llama: Zoo, tmp_path: Path) -> None:
    """All factors B are zero, as peft initialises them: the base, and no adapter that peft could load."""
    untrained = {
        name: lora_zoo.copy_adapter(adapter, tmp_path / name, lambda f: {n: t * 0 if "lora_B" in n else t for n, t in f.items()})
        for name, adapter in llama.adapters.items()
    }
    merge(llama, tmp_path / "dense", experts=untrained)
    assert_equal_tensors(read_tensors(tmp_path / "dense"), read_tensors(llama.base))
    with pytest.raises(acemerge.MergeError, match=r"no expert changes any matrix.*leave out --as adapter"):
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["FULL", "--as", "adapter"], "full models or DoRA adapters), so their change has no small rank; give --rank R"),
        (["--as", "adapter", "-m", "ties"], "14 tensors, such as 'model.layers.0.mlp.down_proj.weight', are merged as whole"),
        (["--as", "adapter", "-m", "emr"], "'emr' makes one model per task, which one adapter cannot hold"),
        (["--as", "adapter", "-m", "emr", "--rank", "4"], "'emr' makes one model per task"),
        (["--rank", "4"], "only an adapter has one"),
        (["--as", "adapter", "--rank", "0"], "Invalid value for '--rank'"),
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
