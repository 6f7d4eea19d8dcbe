"""What the configs of some model types need besides small numbers, for a small model to be made of them.

By `model_type`, also of a config within another. What is given here replaces what was made of the config's numbers; of
a config within, number by number. Most are sizes that have to agree with each other, and lists with an entry per layer.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 101
"""Tokens of every small model: a number that no other size has."""

_TURNS_OF_8 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_ALL_LAYERS_ATTEND = {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]}
_ASSISTANT = {  # a draft model
    **_ALL_LAYERS_ATTEND,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
_MIMI = {  # an audio codec: its width is the last convolution's
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
    "upsample_groups": 32,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 8,
}
_SOUND_CODEC = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1], "hidden_size": 16}
_TIMM = {"architecture": "resnet18", "model_args": {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 32]}}
_RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
_DETR = {"backbone_config": {**_RESNET, "out_features": ["stage4"]}}

NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 7, "IMGIMGA": 8}},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "resolution": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _TURNS_OF_8}},
    "cosmos3_edge_text": {"rope_parameters": _TURNS_OF_8},
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32]},
    "deformable_detr": {"backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}},
    "detr": _DETR,
    "diffusion_gemma_text": {
        **_ALL_LAYERS_ATTEND,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "global_head_dim": 8,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25},
    "emu3": {"vocabulary_map": {"<image>": 7, "<|extra_200|>": 9, "<|visual token 000000|>": 8}},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "attn_resolutions": [1]},
    "ernie4_5_vl_moe_text": {"rope_parameters": _TURNS_OF_8},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32},
    "fast_vlm": {"vision_config": {**_TIMM, "hidden_size": 32}},
    "florence_vision": {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 4],
        "num_groups": [2, 4],
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8, "projector_hidden_size": 48}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma3n_vision": _TIMM,
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_ASSISTANT}},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
        "vision_config": {"hidden_size": 64},  # of which it makes a head
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": _TURNS_OF_8},
    "kyutai_speech_to_text": {"ffn_dim": 48},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32},
    "mimi": _MIMI,
    "ministral": {"head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 2, "patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "neomme": {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
    "perceiver": {"d_latents": 32, "output_shape": [1, 4, 16, 16], "train_size": [16, 16], "image_size": 16},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32},
        },
    },
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 128},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "reformer": {"is_decoder": True},
    "table-transformer": _DETR,
    "timm_backbone": {"backbone": "resnet18"},
    "timm_wrapper": _TIMM,
    "vibevoice_acoustic_tokenizer": _SOUND_CODEC,
    "vibevoice_acoustic_tokenizer_encoder": _SOUND_CODEC,
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 64},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
    },
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "num_key_value_heads": 4},
}
