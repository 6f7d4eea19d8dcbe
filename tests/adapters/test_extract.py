"""`acemerge extract`: full fine-tunes as adapters, which peft loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
import lora_zoo
from adapter_merging import assert_same_changes, loaded, merge
from command import Command
from lora_zoo import Zoo
from model_zoo import Tensors, file_hashes, read_tensors

CLASSES = ("LlamaForCausalLM", "BertModel", "GPT2LMHeadModel")
Tuned = Callable[[str], Zoo]


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A base and a full fine-tune of it that changed everything."""

    @cache
    def make(class_name: str) -> Zoo:
        root = tmp_path_factory.mktemp(class_name)
        base = lora_zoo.write_base(root / "base", class_name)
        with lora_zoo.quiet():
            model = lora_zoo.load(base, class_name)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            model.save_pretrained(root / "tuned")
        return Zoo(base, class_name, {}, {"tuned": root / "tuned"})

    return make


def extract(zoo: Zoo, output: Path, **settings: Any) -> list[dict[str, Any]]:
    acemerge.extract(zoo.base, zoo.full["tuned"], output, **settings)
    records: list[dict[str, Any]] = json.loads((output / "acemerge_manifest.json").read_text())["tensors"]
    return records


def changes(zoo: Zoo) -> Tensors:
    base, after = read_tensors(zoo.base), read_tensors(zoo.full["tuned"])
    return {name: after[name].double() - base[name].double() for name in base}


def assert_answers_alike(zoo: Zoo, adapter: Path) -> None:
    """Also before the adapter is merged into the base, where a tied output layer is a module of its own."""
    tokens = torch.arange(2, 12)[None]
    with lora_zoo.quiet(), torch.no_grad():
        found = lora_zoo.peft_model(zoo.base, adapter, zoo.class_name).eval()(tokens)[0]
        expected = lora_zoo.load(zoo.full["tuned"], zoo.class_name).eval()(tokens)[0]
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("class_name", CLASSES)
def test_at_full_rank_with_the_rest_it_is_the_fine_tune(class_name: str, tuned: Tuned, tmp_path: Path) -> None:
    zoo = tuned(class_name)
    records = extract(zoo, tmp_path / "out", rank=99, save_rest=True)
    assert_answers_alike(zoo, tmp_path / "out")
    assert_same_changes(loaded(zoo, tmp_path / "out"), read_tensors(zoo.full["tuned"]), read_tensors(zoo.base))
    assert {record["written"] for record in records} == {"factors", "value"}
    settings = lora_zoo.read_settings(tmp_path / "out")
    assert settings["fan_in_fan_out"] == (class_name == "GPT2LMHeadModel")
    assert settings["bias"] == ("none" if class_name == "LlamaForCausalLM" else "all")
    assert settings["task_type"] == (None if class_name == "BertModel" else "CAUSAL_LM")


@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("rank", [1, 5])
def test_a_rank_is_the_nearest_and_the_rest_stays_with_the_base(class_name: str, rank: int, tuned: Tuned, tmp_path: Path) -> None:
    """Eckart and Young, by numpy; what is told is what peft's merge has."""
    zoo = tuned(class_name)
    records = extract(zoo, tmp_path / "out", rank=rank)
    found, base, exact = loaded(zoo, tmp_path / "out"), read_tensors(zoo.base), changes(zoo)
    energies = {"factors": 0.0, "cut": 0.0, "left_out": 0.0}
    assert sum(record["written"] == "factors" for record in records) >= 8
    for record in records:
        change = found[record["name"]].double() - base[record["name"]].double()
        energy = float(exact[record["name"]].square().sum())
        if record["written"] == "left out":
            assert not change.any()
            energies["left_out"] += energy
            continue
        s = np.linalg.svd(exact[record["name"]].numpy(), compute_uv=False)
        kept = float((s[:rank] ** 2).sum() / (s**2).sum())
        assert record["rank"] == rank
        assert record["energy_kept"] == pytest.approx(kept, abs=1e-5)
        error = float((change - exact[record["name"]]).norm() / exact[record["name"]].norm())
        assert record["relative_error"] == pytest.approx(error, abs=1e-4)
        energies["factors"] += kept * energy
        energies["cut"] += (1 - kept) * energy
    told = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())["energy"]
    for what, value in energies.items():
        assert told[what] == pytest.approx(value / sum(energies.values()), abs=1e-5)


def test_energy_gives_every_matrix_its_own_rank(tuned: Tuned, tmp_path: Path) -> None:
    zoo = tuned("LlamaForCausalLM")
    records = extract(zoo, tmp_path / "out", energy=0.7)
    exact = changes(zoo)
    for record in (record for record in records if record["written"] == "factors"):
        squares = np.linalg.svd(exact[record["name"]].numpy(), compute_uv=False) ** 2
        assert record["rank"] == int((squares.cumsum() < 0.7 * squares.sum()).sum()) + 1
        assert record["energy_kept"] >= 0.7 - 1e-6
    settings = lora_zoo.read_settings(tmp_path / "out")
    assert len(set(settings["rank_pattern"].values())) > 1
    loaded(zoo, tmp_path / "out")
    capped = extract(zoo, tmp_path / "capped", energy=0.7, rank=3)
    assert {record["rank"] for record in capped if "rank" in record} == {3}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_factors_in_another_dtype(dtype: str, tuned: Tuned, tmp_path: Path) -> None:
    extract(tuned("LlamaForCausalLM"), tmp_path / "out", rank=4, dtype=dtype)
    assert {str(factor.dtype) for factor in lora_zoo.read_factors(tmp_path / "out").values()} == {f"torch.{dtype}"}


def test_names_of_the_model_where_the_base_lacks_its_prefix(tuned: Tuned, tmp_path: Path) -> None:
    """The first GPT-2 on the hub is stored so."""
    zoo = tuned("GPT2LMHeadModel")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text((zoo.base / "config.json").read_text())
    stored = load_file(zoo.base / "model.safetensors")
    save_file({name.removeprefix("transformer."): value for name, value in stored.items()}, base / "model.safetensors")
    extract(Zoo(base, zoo.class_name, {}, zoo.full), tmp_path / "short", rank=99, save_rest=True)
    extract(zoo, tmp_path / "long", rank=99, save_rest=True)
    assert lora_zoo.read_settings(tmp_path / "short") == lora_zoo.read_settings(tmp_path / "long")
    assert_same_changes(loaded(zoo, tmp_path / "short"), read_tensors(zoo.full["tuned"]), read_tensors(zoo.base))


def test_a_head_comes_back_by_task(tmp_path: Path) -> None:
    class_name = "BertForSequenceClassification"
    base = lora_zoo.write_base(tmp_path / "base", "BertModel")
    with lora_zoo.quiet():
        model = lora_zoo.load(base, class_name, labels=3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02
        model.save_pretrained(tmp_path / "tuned")
    acemerge.extract(base, tmp_path / "tuned", tmp_path / "out", rank=99, save_rest=True)
    acemerge.export_expert(tmp_path / "out", "tuned", tmp_path / "task")
    with lora_zoo.quiet():
        merged = lora_zoo.peft_model(base, tmp_path / "task", class_name, labels=3).merge_and_unload()
    expected = model.state_dict()
    for name, value in merged.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-5), name


def test_the_command_tells_verifies_and_replaces(tuned: Tuned, tmp_path: Path, command: Command) -> None:
    zoo, out = tuned("LlamaForCausalLM"), tmp_path / "out"
    arguments = ["extract", zoo.base, zoo.full["tuned"], "-o", out]
    code, told, error = command(*arguments, "--rank", 4, "-v")
    assert code == 0, error
    assert re.search(r"model\.layers\.0\.mlp\.up_proj\.weight .* factors +4 ", told)
    assert "left out" in told
    shares = json.loads((out / "acemerge_manifest.json").read_text())["energy"]
    assert f"{shares['factors']:.1%} in factors, {shares['cut']:.1%} cut off by the rank, {shares['left_out']:.1%}" in told
    assert acemerge.verify(out).problems == []
    before = file_hashes(out)
    assert command(*arguments, "--rank", 4)[0] == 2  # there already
    code, told, _ = command(*arguments, "--rank", 4, "--overwrite", "-q", "--threads", 1)
    assert (code, told) == (0, "")
    assert file_hashes(out) == before
    code, told, _ = command(*arguments, "--energy", 0.5, "--overwrite", "--json")
    assert code == 0
    assert json.loads(told)["saved_as"] == "adapter"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "say how large the adapter may be: --rank 32, or --energy 0.95"),
        (["--energy", "1.5"], "energy"),
        (["--rank", "0"], "--rank"),
    ],
)
def test_what_is_refused(flags: list[str], says: str, tuned: Tuned, tmp_path: Path, command: Command) -> None:
    zoo = tuned("LlamaForCausalLM")
    code, _, error = command("extract", zoo.base, zoo.full["tuned"], "-o", tmp_path / "out", *flags)
    assert code == 2
    assert says in error
    assert not (tmp_path / "out").exists()


def test_a_copy_of_the_base_has_nothing_to_extract(tuned: Tuned, tmp_path: Path, command: Command) -> None:
    zoo = tuned("LlamaForCausalLM")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((zoo.base / name).read_bytes())
    code, _, error = command("extract", zoo.base, copy, "-o", tmp_path / "out", "--rank", 2)
    assert code == 1
    assert "no expert changes any matrix" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["ace", "ties", "average"])
def test_merges_of_full_models_and_adapters_as_one_adapter(method: str, llama: Zoo, tmp_path: Path) -> None:
    """At full rank, the matrices are those of the merge that is written as a model."""
    experts = {"math": llama.full["math"], "code": llama.adapters["code"]}
    merge(llama, tmp_path / "model", method, experts)
    merge(llama, tmp_path / "adapter", method, experts, save_as="adapter", rank=99, save_rest=True)
    assert_same_changes(loaded(llama, tmp_path / "adapter"), read_tensors(tmp_path / "model"), read_tensors(llama.base))
