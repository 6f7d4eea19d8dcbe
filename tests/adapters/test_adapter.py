"""Adapters of strangers: names, prefixes and files that are not what they should be."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import lora_zoo as zoo
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.cli.app import main
from acemerge.errors import InputError
from adapter_reading import BERT, GPT2, LLAMA, Q0, Bases, Refuse, assert_equal_changes, changed, read, without
from model_zoo import Tensors, rewrite


def test_pickled_weights(bases: Bases, tmp_path: Path) -> None:
    base = bases(GPT2)
    pickled = zoo.write_adapter(base, tmp_path / "bin", GPT2, safe=False, target_modules=["c_attn", "wte"], use_dora=True)
    assert (pickled / "adapter_model.bin").is_file()
    safe = zoo.write_adapter(base, tmp_path / "safe", GPT2, target_modules=["c_attn", "wte"], use_dora=True)
    _, found = read(base, pickled)
    _, expected = read(base, safe)
    assert all(found[name].equal(expected[name]) for name in expected)
    assert any(change.any() for change in found.values())


@pytest.mark.parametrize(
    ("base_class", "adapter_class", "target"),
    [
        ("BertModel", "BertForSequenceClassification", "query"),
        ("BertForMaskedLM", "BertModel", "query"),
        ("RobertaForMaskedLM", "RobertaForSequenceClassification", "dense"),
        ("RobertaModel", "RobertaForSequenceClassification", "value"),
        ("GPT2LMHeadModel", "GPT2ForSequenceClassification", "c_attn"),
        ("GPT2Model", "GPT2LMHeadModel", "c_proj"),
        ("GPT2ForSequenceClassification", "GPT2Model", "c_fc"),
        ("LlamaForCausalLM", "LlamaModel", "q_proj"),
        ("LlamaModel", "LlamaForCausalLM", "down_proj"),
        ("ViTModel", "ViTForImageClassification", "q_proj"),
        ("ViTForImageClassification", "ViTModel", "fc1"),
    ],
)
def test_names_with_and_without_a_prefix(base_class: str, adapter_class: str, target: str, bases: Bases, tmp_path: Path) -> None:
    """The adapter's own model has another prefix than the base: the changes are the same under the base's names."""
    base = bases(base_class)
    settings: dict[str, Any] = {"target_modules": f".*layer.*{target}" if target == "dense" else [target], "lora_alpha": 20}
    adapter = zoo.write_adapter(base, tmp_path / "adapter", adapter_class, **settings)
    full = zoo.expand(base, adapter, tmp_path / "full", adapter_class)
    expert, found = read(base, adapter)
    merged = open_checkpoint(full, "full")
    moved = {name for name, change in found.items() if change.any()}
    assert len(moved) == len(expert.changes or {}) >= 2
    opened = open_checkpoint(base, "base")
    values = {name.split(".", 1)[1] if name.split(".")[0] in _PREFIXES else name: merged.read(name) for name in merged.tensors}
    for name in moved:
        bare = name.split(".", 1)[1] if name.split(".")[0] in _PREFIXES else name
        assert (found[name] - (values[bare] - opened.read(name))).abs().max() <= 1e-6, name


_PREFIXES = ("bert", "roberta", "transformer", "model", "vit")


def test_one_changed_module_is_enough_to_find_the_prefix(bases: Bases, tmp_path: Path) -> None:
    base = bases("BertModel")
    target = "bert.encoder.layer.1.attention.self.query"
    adapter = zoo.write_adapter(base, tmp_path / "adapter", "BertForMaskedLM", target_modules=[target])
    _, found = read(base, adapter)
    assert [name for name, change in found.items() if change.any()] == ["encoder.layer.1.attention.self.query.weight"]


def test_checkpoints_saved_while_training_keep_the_adapters_name_in_keys(bases: Bases, tmp_path: Path) -> None:
    """state_dict() of the wrapped model has `.default.` in its names and the modules that saved ones stand in for."""
    base = bases(BERT)
    adapter = zoo.write_adapter(base, tmp_path / "adapter", BERT, task_type="SEQ_CLS", target_modules=["query"])

    def as_in_state_dict(factors: Tensors) -> Tensors:
        named = {re.sub(r"(lora_[AB])\.", r"\1.default.", name): value for name, value in factors.items()}
        heads = {name: value for name, value in named.items() if ".classifier." in name}
        inside = {name.replace(".classifier.", ".classifier.modules_to_save.default."): value for name, value in heads.items()}
        replaced = {name.replace(".classifier.", ".classifier.original_module."): value + 1 for name, value in heads.items()}
        return {**{name: value for name, value in named.items() if name not in heads}, **inside, **replaced}

    renamed = zoo.copy_adapter(adapter, tmp_path / "renamed", as_in_state_dict)
    _, expected = read(base, adapter)
    _, found = read(base, renamed)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_copies_of_the_bases_embedding_are_left_out(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    with zoo.quiet():
        model = peft.get_peft_model(zoo.load(base, LLAMA), peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
        model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    assert any("base_layer" in name for name in zoo.read_factors(tmp_path / "adapter"))
    expert, found = read(base, tmp_path / "adapter")
    assert set(expert.changes or {}) == {"model.embed_tokens.weight"}
    assert not any(change.any() for change in found.values())  # B and A as peft initialises them: no change yet


def test_grown_vocabularies_are_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    with zoo.quiet():
        model = zoo.load(base, LLAMA)
        model.resize_token_embeddings(44)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
        wrapped.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    with pytest.raises(InputError, match=r"comes with its own 'model.embed_tokens.weight' \[44, 16\].*larger vocabulary"):
        read(base, tmp_path / "adapter")


def test_a_copy_of_another_bases_embedding_is_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    other = rewrite(base, tmp_path / "other", lambda tensors: {n: t + 0.01 for n, t in tensors.items()})
    with zoo.quiet():
        model = peft.get_peft_model(zoo.load(other, LLAMA), peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
        model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    with pytest.raises(InputError, match="a change of another base"):
        read(base, tmp_path / "adapter")


def test_weights_that_are_missing_or_cut_short(bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "not a whole safetensors file" in refusal(bases(LLAMA), adapter)
    weights.unlink()
    assert "neither adapter_model.safetensors nor adapter_model.bin" in refusal(bases(LLAMA), adapter)


def test_every_broken_adapter_is_reported_at_once(
    bases: Bases, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [zoo.copy_adapter(plain, tmp_path / f"broken-{i}", without(f"{part}.weight")) for i, part in enumerate("AB")]
    monkeypatch.setattr(
        sys, "argv", ["acemerge", "merge", str(bases(LLAMA)), str(plain), *map(str, broken), "-o", str(tmp_path / "o")]
    )
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err
    assert "2 problems found" in message
    assert "broken-0" in message
    assert "broken-1" in message


@pytest.mark.parametrize("save_as", ["model", "adapter"])
@pytest.mark.parametrize("part", ["A.weight", "B.weight"])
def test_nan_factors(
    save_as: str, part: str, bases: Bases, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    adapter = zoo.copy_adapter(
        plain, tmp_path / "adapter", changed(part, lambda f: f.index_fill(0, torch.tensor([1]), float("nan")))
    )
    arguments = ["merge", str(bases(LLAMA)), str(plain), str(adapter), "-o", str(tmp_path / "out"), "--as", save_as, "-q"]
    monkeypatch.setattr(sys, "argv", ["acemerge", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1  # headers do not show it
    message = capsys.readouterr().err
    assert re.search(rf"{adapter}.* has \d+ NaN or infinite values in '{re.escape(Q0 + part)}'", message), message
    assert not (tmp_path / "out").exists()


def test_an_adapter_as_the_base_is_refused(plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    adapter = shutil.copytree(plain, tmp_path / "adapter")
    assert "a PEFT adapter, not a full model; give it as an expert" in refusal(adapter, adapter)


def test_the_base_prefix_is_not_guessed_from_shapes_alone(bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    """An adapter of another family, with matrices of the same shapes."""
    adapter = zoo.write_adapter(bases("BertModel"), tmp_path / "adapter", "BertModel", target_modules=["query", "value"])
    message = refusal(bases(LLAMA), adapter)
    assert "encoder.layer.0.attention.self.query.weight' [16, 16]" in message
    assert "not in base" in message


@pytest.mark.parametrize("alike", [True, False])
def test_a_module_saved_twice(alike: bool, bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    """peft does, if embeddings are to be saved and are trained whole."""
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    once = zoo.write_adapter(bases(LLAMA), tmp_path / "once", LLAMA, **settings)
    twice = zoo.copy_adapter(
        once, tmp_path / "twice", lambda f: {**f, "base_model.model.lm_head.modules_to_save.weight": f[_LM_HEAD] + (not alike)}
    )
    if alike:
        assert_equal_changes(read(bases(LLAMA), twice)[1], read(bases(LLAMA), once)[1])
    else:
        assert "both stand for lm_head.weight, and are not equal" in refusal(bases(LLAMA), twice)


_LM_HEAD = "base_model.model.lm_head.weight"
