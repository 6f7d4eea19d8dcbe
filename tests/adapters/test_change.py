"""Every change that a PEFT adapter makes equals what peft's own merge does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_zoo as zoo
from adapter_reading import BERT, GPT2, LLAMA, ROBERTA, TARGETS, VIT, Bases, assert_equal_changes, differences, read
from model_zoo import rewrite

_EVERYWHERE: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 6},
    "dora": {"use_dora": True},
    "bias_all": {"bias": "all"},
    "bias_lora_only": {"bias": "lora_only", "lora_alpha": 12},
}


_SPECIAL: list[tuple[str, str, dict[str, Any]]] = [
    ("rank_pattern", "GPT2LMHeadModel", {"rank_pattern": {"c_proj": 5, "h.1.attn.c_attn": 2}}),
    ("alpha_pattern", "GPT2LMHeadModel", {"alpha_pattern": {"c_proj": 7, r"h\.0\.attn\.c_attn": 1}, "use_rslora": True}),
    (
        "both_patterns",
        LLAMA,
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 1, "q_proj": 6}, "alpha_pattern": {"k_proj": 3}},
    ),
    ("both_patterns", VIT, {"rank_pattern": {"fc1": 20}, "alpha_pattern": {"0.mlp.fc1": 5, "q_proj": 3}}),
    ("fan_in_fan_out", GPT2, {"fan_in_fan_out": True}),
    ("no_fan_in_fan_out", GPT2, {"fan_in_fan_out": False}),
    ("embeddings", GPT2, {"target_modules": ["wte", "wpe", "c_attn"], "use_rslora": True}),
    ("embeddings", LLAMA, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("embeddings", "BertModel", {"target_modules": ["word_embeddings", "position_embeddings", "query"]}),
    ("tied_embeddings", "GPT2LMHeadModel", {"target_modules": ["wte", "c_attn"]}),
    ("embeddings_dora", GPT2, {"target_modules": ["wte", "c_attn"], "use_dora": True}),
    ("saved_embeddings", LLAMA, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("saved_embeddings_dora", LLAMA, {"modules_to_save": ["embed_tokens"], "use_dora": True, "use_rslora": True}),
    ("saved_norms", BERT, {"modules_to_save": ["LayerNorm"]}),
    ("saved_head", VIT, {"modules_to_save": ["classifier"]}),
    ("lora_bias", "BertModel", {"lora_bias": True, "lora_alpha": 12}),
    ("lora_bias_conv1d", "GPT2LMHeadModel", {"lora_bias": True}),
    ("lora_bias", VIT, {"lora_bias": True, "use_rslora": True}),
    ("conv", VIT, {"target_modules": ["projection", "q_proj"]}),
    ("conv_dora", VIT, {"target_modules": ["projection"], "use_dora": True}),
    ("conv_lora_bias", VIT, {"target_modules": ["projection"], "lora_bias": True}),
    ("conv_rank_above_out", VIT, {"target_modules": ["projection"], "r": 20}),
    ("rank_above_both_sides", LLAMA, {"r": 40}),
    ("all_linear", LLAMA, {"target_modules": "all-linear"}),
    ("layers_to_transform", LLAMA, {"layers_to_transform": [1]}),
    ("exclude_modules", ROBERTA, {"exclude_modules": ["roberta.encoder.layer.0.attention.self.query"]}),
    ("alpha_zero", LLAMA, {"lora_alpha": 0}),
    ("alpha_negative", LLAMA, {"lora_alpha": -3}),
    ("gaussian", LLAMA, {"init_lora_weights": "gaussian"}),
    ("orthogonal", LLAMA, {"init_lora_weights": "orthogonal"}),
    ("mica", LLAMA, {"init_lora_weights": "mica"}),
]


_CASES = [(kind, cls, s) for kind, s in _EVERYWHERE.items() for cls in (GPT2, LLAMA, BERT, ROBERTA, VIT)] + _SPECIAL


@pytest.mark.parametrize(("kind", "class_name", "settings"), _CASES, ids=[f"{kind}-{cls}" for kind, cls, _ in _CASES])
def test_changes_equal_pefts_merge(kind: str, class_name: str, settings: dict[str, Any], bases: Bases, tmp_path: Path) -> None:
    base = bases(class_name)
    with_targets = {"target_modules": TARGETS[class_name], **settings}
    adapter = zoo.write_adapter(base, tmp_path / "adapter", class_name, **with_targets)
    expected = differences(base, zoo.expand(base, adapter, tmp_path / "full", class_name))
    expert, found = read(base, adapter)
    assert_equal_changes(found, expected)
    assert set(expert.tensors) <= set(found), "names that the base does not have"
    moved = {name for name, change in expected.items() if change.any()}
    assert moved or kind == "alpha_zero"
    assert moved <= set(expert.tensors)


def test_task_types_save_their_head_with_the_adapter(bases: Bases, tmp_path: Path) -> None:
    base = bases(BERT)
    adapter = zoo.write_adapter(base, tmp_path / "adapter", BERT, task_type="SEQ_CLS", target_modules=["query"])
    expert, found = read(base, adapter)
    assert {"classifier.weight", "classifier.bias"} <= set(expert.tensors)
    assert_equal_changes(found, differences(base, zoo.expand(base, adapter, tmp_path / "full", BERT)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("use_dora", [False, True])
def test_factors_of_other_precisions(dtype: torch.dtype, use_dora: bool, bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    whole = zoo.write_adapter(base, tmp_path / "whole", LLAMA, target_modules=["q_proj", "up_proj"], use_dora=use_dora)
    adapter = zoo.copy_adapter(whole, tmp_path / "adapter", lambda factors: {n: t.to(dtype) for n, t in factors.items()})
    _, found = read(base, adapter)
    assert_equal_changes(found, differences(base, zoo.expand(base, adapter, tmp_path / "full", LLAMA)))


def test_a_base_in_half_precision(bases: Bases, tmp_path: Path) -> None:
    half = rewrite(bases(LLAMA), tmp_path / "half", lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    adapter = zoo.write_adapter(bases(LLAMA), tmp_path / "adapter", LLAMA, target_modules=["q_proj"])
    _, on_half = read(half, adapter)
    _, on_whole = read(bases(LLAMA), adapter)
    assert_equal_changes(on_half, on_whole)  # the change does not depend on the base


@pytest.mark.parametrize("class_name", [GPT2, LLAMA, VIT])
def test_dora_that_was_never_trained_changes_nothing(class_name: str, bases: Bases, tmp_path: Path) -> None:
    """Exactly: rounding would be taken for an expert's opinion."""
    extra = {GPT2: ["wte"], LLAMA: ["embed_tokens"], VIT: ["projection"]}[class_name]
    settings: dict[str, Any] = {"target_modules": [*TARGETS[class_name], *extra], "use_dora": True, "strength": 0.0}
    expert, found = read(bases(class_name), zoo.write_adapter(bases(class_name), tmp_path / "adapter", class_name, **settings))
    assert len(expert.changes or {}) > 4
    assert not any(change.any() for change in found.values())
