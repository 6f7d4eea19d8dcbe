"""What experts are decides how far the default goes: the base may have written text where the experts classify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import acemerge
from acemerge.methods import get_method
from small_models import base_tensors, fine_tuned, write_model

CLASSIFIERS, WRITERS = 0.08, 0.04


def model(folder: Path, classes: Any, seed: int | None = None) -> Path:
    tensors = base_tensors() if seed is None else fine_tuned(base_tensors(), seed)
    return write_model(folder, tensors, {} if classes is None else {"architectures": classes})


@pytest.mark.parametrize(
    ("base", "expert", "expected"),
    [
        (["LlamaForCausalLM"], ["LlamaForCausalLM"], WRITERS),
        (["BertForMaskedLM"], ["BertForSequenceClassification"], CLASSIFIERS),
        (["GPT2LMHeadModel"], None, WRITERS),
        (["BertModel"], ["BertForMaskedLM"], WRITERS),
        (None, None, CLASSIFIERS),
        ("LlamaForCausalLM", 7, CLASSIFIERS),
    ],
)
def test_the_experts_class_counts_before_the_base_s(base: Any, expert: Any, expected: float, tmp_path: Path) -> None:
    experts = [model(tmp_path / f"e{seed}", expert, seed) for seed in range(2)]
    plan = acemerge.plan(model(tmp_path / "base", base), experts)
    assert plan.options == get_method("ace_auto").options({"reach": expected})


@pytest.mark.parametrize(("task_type", "expected"), [("SEQ_CLS", CLASSIFIERS), ("CAUSAL_LM", WRITERS), (None, WRITERS)])
def test_an_adapter_s_task_type_counts(task_type: str | None, expected: float, tmp_path: Path) -> None:
    base, adapter = model(tmp_path / "base", ["LlamaForCausalLM"]), tmp_path / "adapter"
    adapter.mkdir()
    factors = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(12, 2)}
    save_file({f"base_model.model.layers.0.{name}": own for name, own in factors.items()}, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": task_type, "r": 2, "lora_alpha": 2, "target_modules": ["0"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert acemerge.plan(base, [adapter]).options == get_method("ace_auto").options({"reach": expected})
