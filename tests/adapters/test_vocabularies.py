"""Adapters beside tokenizers: their changes are of the base's rows, so another vocabulary is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import acemerge
import lora_zoo
import vocabulary_zoo as zoo
from acemerge.errors import InputError


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """A base, an adapter with a tokenizer of its own, and a full expert with a token more."""
    base = zoo.base(tmp_path / "base")
    adapter = lora_zoo.write_adapter(base, tmp_path / "lora", "LlamaForCausalLM", target_modules=["q_proj"])
    content = json.loads((base / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 280, "content": "<x>"})
    (adapter / "tokenizer.json").write_text(json.dumps(content))
    return [base, adapter, zoo.expert(base, tmp_path / "full", "<y>")]


def refused(base: Path, experts: list[Path], **asked: str) -> str:
    with pytest.raises(InputError) as error:
        acemerge.plan(base, experts, "task_arithmetic", options={}, **asked)
    return str(error.value)


@pytest.mark.parametrize("choice", ["union", "lora"])
def test_an_adapter_with_another_vocabulary(choice: str, models: list[Path]) -> None:
    base, *experts = models
    said = refused(base, experts, tokenizer=choice)
    assert f"--tokenizer {choice}: expert 'lora' " in said
    assert "is an adapter with another vocabulary than the base's" in said


def test_by_default_it_is_told(models: list[Path]) -> None:
    base, *experts = models
    notes = acemerge.plan(base, experts, "task_arithmetic").notes
    assert any("expert 'lora' has 1 token that the base lacks, such as '<x>'" in note for note in notes)


def test_one_with_the_bases_vocabulary_goes_with_a_union(models: list[Path], tmp_path: Path) -> None:
    base, adapter, full = models
    (adapter / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    acemerge.merge(base, [adapter, full], tmp_path / "out", "task_arithmetic", tokenizer="union", files_from="lora", alpha=1.0)
    found, theirs = zoo.weights(tmp_path / "out")["model.embed_tokens.weight"], zoo.weights(full)["model.embed_tokens.weight"]
    assert torch.equal(found[280], theirs[280])
    torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("asked", [{"tokenizer": "union"}, {"files_from": "lora"}])
def test_an_adapter_as_output_has_no_vocabulary(asked: dict[str, str], models: list[Path]) -> None:
    base, adapter, _ = models
    assert "an adapter has its base's vocabulary" in refused(base, [adapter], save_as="adapter", **asked)
