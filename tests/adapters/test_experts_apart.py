"""LoRA of a mixture's experts (`target_parameters`) where the base's file holds each expert by itself, against peft's own merge.

transformers 5 stacks such experts as it loads them, and takes them apart again as it saves a model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import acemerge
import lora_zoo
from acemerge.adapters.apart import stacks
from acemerge.checkpoints.tensor_header import TensorHeader
from adapter_reading import LLAMA, Bases, assert_equal_changes, differences, read
from model_zoo import read_tensors

_SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
_MIXTURES: dict[str, Callable[[], Any]] = {
    "experts.0.w1, another module's name": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(intermediate_size=24, num_local_experts=3, **_SIZES)
    ),
    "experts.0.gate_proj": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(moe_intermediate_size=24, intermediate_size=32, num_experts=3, head_dim=8, **_SIZES)
    ),
    "a dense first layer": lambda: transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            moe_intermediate_size=24, intermediate_size=32, n_routed_experts=3, head_dim=8, n_group=1, topk_group=1,
            first_k_dense_replace=1, **_SIZES,
        )
    ),
}  # fmt: skip
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_TARGETS: dict[str, dict[str, Any]] = {
    "everything linear": {"target_modules": "all-linear"},  # the router too, and a rank of its own for gate_up_proj
    "both parameters": {"target_modules": ["q_proj"], "target_parameters": _EXPERTS},
    "one of them": {"target_modules": [], "target_parameters": ["down_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj"], "target_parameters": [*_EXPERTS, "mlp.gate.weight"],
        "rank_pattern": {"gate_up_proj": 3, r"mlp\.gate": 5}, "alpha_pattern": {"down_proj": 7, "gate.weight": 5},
    },
}  # fmt: skip


def write(folder: Path, mixture: str, seed: int = 1, **settings: Any) -> tuple[Path, Path, Path]:
    """A base, an adapter and what peft makes of both."""
    with lora_zoo.quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = _MIXTURES[mixture]()
        model.save_pretrained(folder / "base")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, **settings))
        torch.manual_seed(seed)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        wrapped.save_pretrained(folder / f"adapter-{seed}")
        wrapped.merge_and_unload().save_pretrained(folder / f"full-{seed}")
    return folder / "base", folder / f"adapter-{seed}", folder / f"full-{seed}"


@pytest.mark.parametrize("targets", _TARGETS)
@pytest.mark.parametrize("mixture", _MIXTURES)
def test_changes_are_pefts(mixture: str, targets: str, tmp_path: Path) -> None:
    base, adapter, full = write(tmp_path, mixture, **_TARGETS[targets])
    _, changes = read(base, adapter)
    assert_equal_changes(changes, differences(base, full))
    assert any("experts.1" in name and change.any() for name, change in changes.items())


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv_m", "ties"])
def test_merges_are_those_of_the_models_that_peft_makes(method: str, tmp_path: Path) -> None:
    """In a common core of their factors, or entry by entry."""
    mixture = "experts.0.w1, another module's name"
    made = [write(tmp_path, mixture, seed, **_TARGETS["both parameters"]) for seed in (1, 2)]
    base = made[0][0]
    changed = {name for name, change in differences(base, made[0][2]).items() if change.any()}
    rules = [{"match": name, "do": "keep"} for name in read_tensors(base) if name not in changed]
    acemerge.merge(base, [adapter for _, adapter, _ in made], tmp_path / "of-adapters", method, tensors=rules)
    acemerge.merge(base, [full for _, _, full in made], tmp_path / "of-models", method, tensors=rules, force=True)
    found, expected = read_tensors(tmp_path / "of-adapters"), read_tensors(tmp_path / "of-models")
    assert found.keys() == expected.keys()
    assert all((found[name] - value).abs().max() < 2e-5 for name, value in expected.items())
    assert not found[min(changed)].equal(read_tensors(base)[min(changed)])


def test_the_merged_model_loads_with_nothing_missing(tmp_path: Path) -> None:
    base, adapter, full = write(tmp_path, "experts.0.gate_proj", **_TARGETS["everything linear"])
    acemerge.merge(base, [adapter], tmp_path / "out", "task_arithmetic", alpha=1.0)
    with lora_zoo.quiet():
        model, told = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        of_peft = transformers.Qwen3MoeForCausalLM.from_pretrained(full)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.tensor([[1, 5, 9, 3]])
    assert (model(tokens).logits - of_peft(tokens).logits).abs().max() < 1e-5


def test_factors_in_16_bits_are_read_as_such(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "experts.0.gate_proj", **_TARGETS["both parameters"])
    weights = adapter / "adapter_model.safetensors"
    rounded = {name: value.bfloat16() for name, value in load_file(weights).items()}
    save_file({name: value.float() for name, value in rounded.items()}, weights)
    _, expected = read(base, adapter)
    save_file(rounded, weights)
    assert_equal_changes(read(base, adapter)[1], expected)


def test_one_adapter_has_no_place_for_parameters(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "experts.0.gate_proj", **_TARGETS["both parameters"])
    with pytest.raises(acemerge.InputError, match=r"--as adapter: expert 'adapter-1' .* as a parameter \(target_parameters\)"):
        acemerge.merge(base, [adapter], tmp_path / "out", save_as="adapter")
    assert not (tmp_path / "out").exists()


def test_a_base_that_holds_no_such_experts_is_refused(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "experts.0.gate_proj", **_TARGETS["both parameters"])
    weights = base / "model.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if ".experts.1." not in name}, weights)
    with pytest.raises(acemerge.InputError, match=r"target_parameters=.* for a base that holds no.*merge_and_unload"):
        read(base, adapter)


def test_the_weight_of_a_linear_layer_as_a_parameter(bases: Bases, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target_modules": [], "target_parameters": ["q_proj.weight"]}
    adapter = lora_zoo.write_adapter(bases(LLAMA), tmp_path / "adapter", LLAMA, **settings)
    full = lora_zoo.expand(bases(LLAMA), adapter, tmp_path / "full", LLAMA)
    assert_equal_changes(read(bases(LLAMA), adapter)[1], differences(bases(LLAMA), full))


def test_experts_of_several_shapes_are_no_stack() -> None:
    one, other = TensorHeader("float32", (4, 6)), TensorHeader("float32", (5, 6))
    names = ("m.experts.0.w2.weight", "m.experts.1.w2.weight")
    assert stacks(dict.fromkeys(names, one))["m.experts.down_proj"].shape == (2, 4, 6)
    assert not stacks(dict(zip(names, (one, other), strict=True)))
    assert not stacks({"m.experts.0.w2.weight": one, "m.experts.2.w2.weight": one})
