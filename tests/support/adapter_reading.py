"""What an adapter changes, as acemerge reads it and as peft's own merge has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from acemerge.adapters.adapter import Adapter, open_adapter
from acemerge.checkpoints.families import choose_family
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.cli.app import main
from model_zoo import Tensors

Bases = Callable[[str], Path]


def read(base: Path, adapter: Path) -> tuple[Adapter, Tensors]:
    """The adapter, and its change of every tensor of the base."""
    opened = open_checkpoint(base, "base")
    family = choose_family("auto", opened.config, opened.tensors)
    expert = open_adapter(adapter, "expert", opened, family)
    changes = {}
    for name in opened.tensors:
        value = opened.read(name)
        if expert.changes and name in expert.changes:
            changes[name] = expert.changes[name].expand(value)
        elif name in expert.tensors:
            changes[name] = expert.read(name) - value
        else:
            changes[name] = torch.zeros_like(value)
    return expert, changes


def differences(base: Path, full: Path) -> Tensors:
    before, after = open_checkpoint(base, "base"), open_checkpoint(full, "full")
    assert before.tensors.keys() <= after.tensors.keys()
    return {name: after.read(name) - before.read(name) for name in before.tensors}


def assert_equal_changes(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, change in expected.items():
        assert found[name].shape == change.shape, name
        assert (found[name] - change).abs().max() <= 1e-6, name


GPT2, LLAMA, BERT, ROBERTA, VIT = (
    "GPT2ForSequenceClassification",
    "LlamaForCausalLM",
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "ViTForImageClassification",
)


TARGETS: dict[str, list[str]] = {
    GPT2: ["c_attn", "c_proj", "c_fc"],
    "GPT2LMHeadModel": ["c_attn", "c_proj"],
    LLAMA: ["q_proj", "k_proj", "down_proj"],
    BERT: ["query", "value", "output.dense"],
    "BertModel": ["query", "value"],
    ROBERTA: ["query", "key", "intermediate.dense"],
    VIT: ["q_proj", "o_proj", "fc1", "fc2"],
}


def refuse(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which the command line refuses an adapter; nothing is written."""
    output = adapter.parent / "out"
    before = sorted(adapter.parent.iterdir())
    monkeypatch.setattr(sys, "argv", ["acemerge", "merge", str(base), str(adapter), "-o", str(output), "--quiet"])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert captured.out == ""
    assert sorted(adapter.parent.iterdir()) == before
    assert "Traceback" not in captured.err
    assert captured.err.startswith("acemerge: error: ")
    assert str(adapter) in captured.err, "names the folder"
    return captured.err


Refuse = Callable[[Path, Path], str]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda factors: {**factors, Q0 + part: change(factors[Q0 + part])}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda factors: {name: value for name, value in factors.items() if name != Q0 + part}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda factors: {name.replace(old, new): value for name, value in factors.items()}
