"""Vision-language models: which tensors merge, experts that are language models, and names of another version of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import acemerge
import lora_zoo
from acemerge.checkpoints.families import align_names, choose_family, is_stored_in_out
from acemerge.checkpoints.folder import from_state_dict
from acemerge.checkpoints.tensor_header import TensorHeader
from model_zoo import bitwise_equal, load_whole, read_tensors

TEXT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 41, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip


def changed(model: transformers.PreTrainedModel, seed: int) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return model


def llava(**text: Any) -> transformers.LlavaForConditionalGeneration:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT, **text),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=40,
    )
    torch.manual_seed(0)
    return changed(transformers.LlavaForConditionalGeneration(config), 0)


def language_model(seed: int | None) -> transformers.LlamaForCausalLM:
    """The language tower by itself, fine-tuned."""
    whole = llava()
    model = transformers.LlamaForCausalLM(whole.config.text_config)
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.lm_head.load_state_dict(whole.lm_head.state_dict())
    return model if seed is None else changed(model, seed)


def test_language_models_are_merged_into_the_tower(tmp_path: Path) -> None:
    """As they are merged by themselves; what they do not have stays as it is."""
    with lora_zoo.quiet():
        llava().save_pretrained(tmp_path / "vlm")
        for name, seed in (("llm", None), ("a", 1), ("b", 2)):
            language_model(seed).save_pretrained(tmp_path / name)
        experts = [tmp_path / "a", tmp_path / "b"]
        acemerge.merge(tmp_path / "vlm", experts, tmp_path / "out", quiet=True)
        acemerge.merge(tmp_path / "llm", experts, tmp_path / "alone", quiet=True)
    base, merged, alone = (read_tensors(tmp_path / name) for name in ("vlm", "out", "alone"))
    in_tower = {name: name.replace("language_model.model.", "model.").removeprefix("language_model.") for name in base}
    for name, weight in merged.items():
        expected = alone.get(in_tower[name], base[name])
        assert bitwise_equal(weight, expected), name
    changed_names = [name for name in base if not bitwise_equal(base[name], merged[name])]
    assert len(changed_names) == 2 * 9 + 1 + 2, "matrices, norms and embeddings of the language tower"
    load_whole("LlavaForConditionalGeneration", tmp_path / "out")


@pytest.mark.parametrize(("method", "embeddings"), [("ace", "kept"), ("ace_auto", "averaged")])
def test_what_merges_in_a_vision_language_model(tmp_path: Path, method: str, embeddings: str) -> None:
    with lora_zoo.quiet():
        llava().save_pretrained(tmp_path / "vlm")
        for seed in (1, 2):
            changed(llava(), seed).save_pretrained(tmp_path / f"{seed}")
        plan = acemerge.merge(tmp_path / "vlm", [tmp_path / "1", tmp_path / "2"], tmp_path / "out", method, quiet=True).plan
    assert plan.family.name == "vlm"
    fates = {tensor.name: tensor.action for tensor in plan.tensors}
    expected = {"lm_head": embeddings, "embed_tokens": embeddings, "linear_1.weight": "merged", "position_embedding": "averaged"}
    for part, action in expected.items():
        assert {fates[name] for name in fates if part in name and not name.endswith("position_ids")} == {action}, part
    towers = {action for name, action in fates.items() if name.endswith(("q_proj.weight", "fc1.weight"))}
    assert towers == {"merged"}


def tensors(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(2, 3) for name in names}


def test_each_tower_may_have_another_prefix() -> None:
    """Qwen2-VL as transformers named it before and after version 4.52."""
    now = tensors(
        "model.language_model.layers.0.mlp.weight", "model.language_model.layers.1.mlp.weight",
        "model.language_model.norm.weight",
        "model.visual.blocks.0.attn.weight", "model.visual.merger.weight", "lm_head.weight",
    )  # fmt: skip
    before = tensors(
        "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "model.norm.weight",
        "visual.blocks.0.attn.weight", "visual.merger.weight", "lm_head.weight",
    )  # fmt: skip
    one, other = from_state_dict(now, "now").tensors, from_state_dict(before, "before").tensors
    assert align_names(one, other) == dict(zip(before, now, strict=True))
    assert align_names(other, one) == dict(zip(now, before, strict=True))


def test_a_tower_of_which_some_tensors_have_no_place_is_left_as_it_is() -> None:
    base = tensors("model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "model.visual.merger.weight")
    expert = tensors("layers.0.mlp.weight", "layers.1.mlp.weight", "other.merger.weight", "other.more.weight")
    aligned = align_names(from_state_dict(base, "base").tensors, from_state_dict(expert, "expert").tensors)
    assert aligned["layers.0.mlp.weight"] == "model.layers.0.mlp.weight"
    assert aligned["other.merger.weight"] not in base


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        ({"architectures": ["NewForCausalLM"]}, "llm"),
        ({"architectures": ["NewForCausalLM"], "text_config": {}, "vision_config": {}}, "vlm"),
        ({"architectures": ["NewForConditionalGeneration"], "vision_config": {}}, "vlm"),
        ({"architectures": ["NewForConditionalGeneration"]}, "seq2seq"),
        ({"architectures": ["NewModel"], "text_config": {}, "vision_config": {}}, "generic"),  # such as another CLIP
        ({"architectures": "NewForCausalLM"}, "generic"),
        ({"architectures": []}, "generic"),
        ({}, "generic"),
    ],
)
def test_a_model_type_that_no_preset_lists_goes_by_its_architecture(config: dict[str, Any], preset: str) -> None:
    assert choose_family("auto", {"model_type": "new", **config}, []).name == preset


def test_gemma3s_projector_is_stored_in_out() -> None:
    """A linear layer has [text, vision]; this parameter is [vision, text]: what the tower gives is multiplied by it as it is."""
    projector = transformers.models.gemma3.modeling_gemma3.Gemma3MultiModalProjector
    config = transformers.Gemma3Config(text_config=TEXT | {"head_dim": 8}, vision_config=VISION)
    shapes = {name: TensorHeader("float32", tuple(value.shape)) for name, value in projector(config).named_parameters()}
    name = "mm_input_projection_weight"
    assert shapes[name].shape == (VISION["hidden_size"], TEXT["hidden_size"])
    family = choose_family("auto", {"model_type": "gemma3"}, shapes)
    assert is_stored_in_out(name, family, shapes)
