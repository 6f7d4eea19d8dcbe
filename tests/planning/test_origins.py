"""Experts that say they were made from another base get a note; the same base under another name does not."""

import json
from pathlib import Path

import pytest

import acemerge
import lora_zoo
from small_models import base_tensors, fine_tuned, write_model


def notes(folder: Path, base: str, config: dict[str, object], card: str = "") -> list[str]:
    """Of a merge of one expert with this config and card."""
    write_model(folder / base, base_tensors(), {"_name_or_path": "someone/original"})
    expert = write_model(folder / "expert", fine_tuned(base_tensors(), 0), config)
    if card:
        (expert / "README.md").write_text(f"---\nlicense: mit\n{card}\n---\nA card.\n")
    return list(acemerge.plan(folder / base, [expert]).notes)


@pytest.mark.parametrize(
    ("config", "card", "named"),
    [
        ({"_name_or_path": "org/other"}, "", "'org/other'"),
        ({}, "base_model: org/other", "'org/other'"),
        ({}, "base_model:\n- org/other\n- org/third", "'org/other' and 'org/third'"),
        ({}, 'base_model: "org/other"', "'org/other'"),
    ],
)
def test_another_base_is_noted(tmp_path: Path, config: dict[str, object], card: str, named: str) -> None:
    [note] = notes(tmp_path, "llama", config, card)
    assert note == f"expert 'expert' says it was made from {named}; the base given is 'llama': make sure it is the same"


@pytest.mark.parametrize(
    ("config", "card"),
    [
        ({}, ""),
        ({"_name_or_path": "org/Llama"}, ""),  # the same folder's name
        ({"_name_or_path": "someone/original"}, ""),  # what the base itself says that it is
        ({"_name_or_path": "/somewhere/checkpoint-500"}, ""),  # any folder that it was once loaded from
        ({"_name_or_path": None}, "base_model: null\nbase_model_relation: merge"),
        ({}, "base_model:\n- org/other\n- org/llama"),
        ({}, "base_model: org/llama@main"),
    ],
)
def test_the_same_base_or_none_is_not(tmp_path: Path, config: dict[str, object], card: str) -> None:
    wanted = [] if "null" not in card else notes(tmp_path / "x", "null", config, card)
    assert notes(tmp_path, "llama" if "null" not in card else "null", config, card) == wanted == []


@pytest.mark.parametrize(
    ("named", "told"), [("org/other", "'org/other'"), ("/home/someone/models/other", "'other'"), ("base", None), (None, None)]
)
def test_adapters_too(tmp_path: Path, named: str | None, told: str | None) -> None:
    base = lora_zoo.write_base(tmp_path / "base", "LlamaForCausalLM")
    adapter = lora_zoo.write_adapter(base, tmp_path / "adapter", "LlamaForCausalLM", r=2, target_modules=["q_proj"])
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": named}))
    found = [note for note in acemerge.plan(base, [adapter]).notes if "made from" in note]
    assert [note.partition(";")[0] for note in found] == ([f"expert 'adapter' says it was made from {told}"] if told else [])
    assert not any("/home" in note for note in found)
