"""Families whose tensors are not what their shapes suggest, under the names that transformers stores them by."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from acemerge.checkpoints.folder import from_state_dict, open_checkpoint
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.recipe.recipe import make_recipe
from model_zoo import quiet_transformers

_LAYERS: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 1}
_TEXT: dict[str, Any] = {**_LAYERS, "num_key_value_heads": 1, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0}
_PICTURES: dict[str, Any] = {**_LAYERS, "image_size": 8, "patch_size": 4}


def _gpt_oss() -> Any:
    settings = {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["full_attention"]}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**_TEXT, pad_token_id=0, **settings))


def _mamba() -> Any:
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 40, "state_size": 4, "tie_word_embeddings": False}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**settings))


def _gemma3() -> Any:
    text = {**_TEXT, "head_dim": 8, "pad_token_id": 0}
    config = transformers.Gemma3Config(text_config=text, vision_config=_PICTURES, mm_tokens_per_image=1)
    return transformers.Gemma3ForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    text = {**_TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Qwen2VLForConditionalGeneration(config)


def planned(model: Any, folder: Path, method: str = "ace") -> Plan:
    """The plan of a merge of two experts that have the model's own tensors."""
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    base = open_checkpoint(folder, "base")
    experts = [replace(base, name=name, files=()) for name in ("one", "two")]
    return build_plan(make_recipe({"base": "base", "experts": ["one", "two"], "method": method}), base, experts, base.config)


@pytest.mark.parametrize(
    ("model", "averaged", "merged", "kept"),
    [
        (
            _gpt_oss,
            ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "mlp.router.weight"],
            ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight"],
            ["lm_head.weight", "embed_tokens.weight"],
        ),
        (
            _mamba,
            ["mixer.A_log", "mixer.D", "conv1d.weight"],
            ["in_proj.weight", "x_proj.weight"],
            ["lm_head.weight", "backbone.embeddings.weight"],
        ),
        (
            _gemma3,
            ["vision_tower.head.probe", "position_embedding.weight"],
            ["vision_tower.head.mlp.fc1.weight", "self_attn.out_proj.weight"],
            ["embed_tokens.weight"],
        ),
        (
            _qwen2_vl,
            ["patch_embed.proj.weight"],
            ["visual.merger.mlp.0.weight", "mlp.up_proj.weight"],
            ["lm_head.weight", "embed_tokens.weight"],
        ),
    ],
    ids=["gpt-oss", "mamba", "gemma3", "qwen2-vl"],
)
def test_only_linear_maps_merge(model: Any, averaged: list[str], merged: list[str], kept: list[str], tmp_path: Path) -> None:
    plan = planned(model(), tmp_path / "base")
    for action, endings in (("averaged", averaged), ("merged", merged), ("kept", kept)):
        for ending in endings:
            fates = {tensor.action for tensor in plan.tensors if tensor.name.endswith(ending)}
            assert fates == {action}, ending
    assert not plan.heads


def test_a_method_for_every_tensor_takes_them_all(tmp_path: Path) -> None:
    plan = planned(_gpt_oss(), tmp_path / "base", "task_arithmetic")
    assert {tensor.action for tensor in plan.tensors} == {"merged"}


# Classes whose names do not say that the model sees and writes.
_CLASSES = {
    "roc_bert": "RoCBertForMaskedLM",
    "roformer": "RoFormerForMaskedLM",
    "evolla": "EvollaForProteinText2Text",
    "parakeet_ctc": "ParakeetForCTC",
    "ultrabert": "UltraBertForMaskedLM",
    "deformable_detr": "DeformableDetrModel",
    "granite_speech5_ctc": "GraniteSpeech5ForCTC",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3",
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
}
_OF_ONE_PART = ("cohere_asr", "kyutai_speech_to_text", "pegasus_x")


@pytest.mark.parametrize(
    ("model_type", "name", "action"),
    [
        ("roc_bert", "roc_bert.embeddings.shape_embed.weight", "kept"),
        ("roc_bert", "roc_bert.embeddings.pronunciation_embed.weight", "kept"),
        ("roformer", "roformer.encoder.embed_positions.weight", "kept"),
        ("florence2", "model.language_model.shared.weight", "kept"),
        ("chameleon", "model.language_model.embed_tokens.weight", "kept"),
        ("diffusion_gemma", "model.decoder.embed_tokens.weight", "kept"),
        ("nemotron_h_omni", "language_model.backbone.embeddings.weight", "kept"),
        ("qwen3_omni_moe", "talker.code_predictor.model.codec_embedding.7.weight", "kept"),
        ("qwen3_omni_moe", "talker.codec_head.weight", "kept"),
        ("janus", "model.generation_head.vision_head.weight", "kept"),
        ("aria", "multi_modal_projector.query", "averaged"),
        ("deepseek_ocr2", "model.qwen2_model.query_1024.weight", "averaged"),
        ("kosmos-2", "image_to_text_projection.latent_query", "averaged"),
        ("kosmos-2.5", "vision_model.embeddings.row_embedder.weight", "averaged"),
        (
            "kyutai_speech_to_text",
            "codec_model.quantizer.semantic_residual_vector_quantizer.layers.0.codebook.embed_sum",
            "averaged",
        ),
        ("qwen2_5_omni", "thinker.audio_tower.audio_bos_eos_token.weight", "averaged"),
        ("qwen2_5_omni", "token2wav.code2wav_dit_model.text_embed.codec_embed.weight", "kept"),
        ("pegasus_x", "model.encoder.embed_global.weight", "averaged"),
        ("parakeet_ctc", "encoder.layers.0.self_attn.bias_u", "averaged"),
        ("deformable_detr", "level_embed", "averaged"),
        ("granite_speech5_ctc", "encoder.layers.0.self_attn.rel_pos_emb.weight", "averaged"),
        ("granite_speech5_ctc", "encoder.out_mid.weight", "averaged"),
        ("ultrabert", "cls.weight", "averaged"),
        ("cohere_asr", "log_softmax.mlp.layer0.weight", "kept"),
        ("evolla", "model.protein_encoder.sequence_compressor_resampler.latents", "averaged"),
        ("ernie4_5_vl_moe", "model.layers.1.mlp.gate.weight_1", "averaged"),
        ("qwen3_vl_moe", "model.visual.deepstack_merger_list.0.linear_fc1.weight", "merged"),
    ],
)
def test_tables_routers_and_layers_over_a_vocabulary_are_no_linear_maps(model_type: str, name: str, action: str) -> None:
    """By their names in files of these families."""
    config = {
        "model_type": model_type,
        "architectures": [_CLASSES.get(model_type, "ForConditionalGeneration")],
        "text_config": {},
    }
    names = (name, "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.up_proj.weight")
    base = from_state_dict({each: torch.zeros(6, 4) for each in names}, "base")
    experts = [replace(base, name=name) for name in ("one", "two")]
    plan = build_plan(make_recipe({"base": "base", "experts": ["one", "two"], "method": "ace"}), base, experts, config)
    assert {tensor.name: tensor.action for tensor in plan.tensors}[name] == action
