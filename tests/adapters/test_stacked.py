"""LoRA of stacked experts (`target_parameters`), against peft's own merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import acemerge
import lora_zoo
from adapter_reading import assert_equal_changes, differences, read
from model_zoo import read_tensors

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def write(folder: Path, inner: int, targets: list[str], **settings: Any) -> tuple[Path, Path, Path]:
    """A base, an adapter and what peft makes of both."""
    config = transformers.GptOssConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=inner, vocab_size=40,
        head_dim=8, num_local_experts=3, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with lora_zoo.quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GptOssForCausalLM(config)
        model.save_pretrained(folder / "base")
        lora = peft.LoraConfig(r=2, lora_alpha=3, target_parameters=targets, **settings)
        wrapped = peft.get_peft_model(model, lora)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        wrapped.save_pretrained(folder / "adapter")
        wrapped.merge_and_unload().save_pretrained(folder / "full")
    return folder / "base", folder / "adapter", folder / "full"


@pytest.mark.parametrize("targets", [_EXPERTS, _EXPERTS[:1]])
@pytest.mark.parametrize("settings", [{"target_modules": "all-linear"}, {"target_modules": ["q_proj"], "use_rslora": True}])
def test_changes_of_stacked_experts_are_pefts(settings: dict[str, Any], targets: list[str], tmp_path: Path) -> None:
    base, adapter, full = write(tmp_path, 24, targets, **settings)
    _, changes = read(base, adapter)
    assert_equal_changes(changes, differences(base, full))
    assert changes["model.layers.0.mlp.experts.gate_up_proj"].any()


def test_square_experts_go_the_way_of_the_others(tmp_path: Path) -> None:
    """gpt-oss's own down_proj is as wide as high: gate_up_proj shows how they are stored."""
    base, adapter, full = write(tmp_path, 16, _EXPERTS, target_modules=["q_proj"])
    assert_equal_changes(read(base, adapter)[1], differences(base, full))


def test_square_experts_alone_are_refused(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, 16, _EXPERTS[1:], target_modules=["q_proj"])
    with pytest.raises(acemerge.InputError, match=r"fit in more than one way.*merge_and_unload"):
        read(base, adapter)


def test_a_merge_of_stacked_experts(tmp_path: Path) -> None:
    base, adapter, full = write(tmp_path, 24, _EXPERTS, target_modules=["q_proj"])
    acemerge.merge(base, [adapter], tmp_path / "out", "task_arithmetic", alpha=1.0)
    found, expected = read_tensors(tmp_path / "out"), read_tensors(full)
    assert all((found[name] - value).abs().max() < 1e-6 for name, value in expected.items())


def test_experts_are_merged_one_by_one_as_those_of_full_models(tmp_path: Path) -> None:
    """By a method for matrices: from factors, an expert at a time, as from the models that peft makes of them."""
    base, adapter, full = write(tmp_path, 24, _EXPERTS, target_modules=["q_proj"])
    changed = read_tensors(full).keys() - {
        name for name, weight in read_tensors(base).items() if weight.equal(read_tensors(full)[name])
    }
    rules = [{"match": name, "do": "keep"} for name in read_tensors(base) if name not in changed]
    acemerge.merge(base, [adapter], tmp_path / "of-adapter")
    acemerge.merge(base, [full], tmp_path / "of-full", tensors=rules, force=True)  # it changed by more than it was
    found, expected, before = (read_tensors(folder) for folder in (tmp_path / "of-adapter", tmp_path / "of-full", base))
    for name in changed:
        error = (found[name] - expected[name]).norm() / (expected[name] - before[name]).norm()
        assert error < 1e-4, name
    assert any(name.endswith("gate_up_proj") for name in changed)


def test_one_adapter_holds_merged_stacks_as_whole_tensors(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, 24, _EXPERTS, target_modules=["q_proj"])
    plan = acemerge.merge(base, [adapter], tmp_path / "out", save_as="adapter").plan
    forms = {tensor.name: tensor.form for tensor in plan.tensors if ".layers.0." in tensor.name}
    assert forms["model.layers.0.mlp.experts.down_proj"] == "value"
    assert forms["model.layers.0.self_attn.q_proj.weight"] == "factors"
