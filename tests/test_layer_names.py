"""What a tensor's name says: its kind and its depth."""

from __future__ import annotations

import pytest

from acemerge.layer_names import depths, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert.encoder.layer.0.attention.self.query.weight", "attention q"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention out"),
        ("bert.encoder.layer.0.intermediate.dense.weight", "MLP up"),
        ("bert.encoder.layer.0.output.dense.weight", "MLP down"),
        ("bert.embeddings.word_embeddings.weight", "embedding"),
        ("transformer.h.0.attn.c_attn.weight", "attention qkv"),
        ("transformer.h.0.attn.c_proj.weight", "attention out"),
        ("transformer.h.0.mlp.c_fc.weight", "MLP up"),
        ("transformer.h.0.mlp.c_proj.weight", "MLP down"),
        ("transformer.wte.weight", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "attention q"),
        ("model.layers.0.self_attn.v_proj.weight", "attention v"),
        ("model.layers.0.self_attn.o_proj.weight", "attention out"),
        ("model.layers.0.mlp.gate_proj.weight", "MLP up"),
        ("model.layers.0.mlp.down_proj.weight", "MLP down"),
        ("vision_model.encoder.layers.0.mlp.fc1.weight", "MLP up"),
        ("vision_model.encoder.layers.0.self_attn.out_proj.weight", "attention out"),
        ("visual.transformer.resblocks.0.attn.in_proj_weight", "attention qkv"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "attention q"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "MLP up"),
        ("encoder.block.0.layer.1.DenseReluDense.wo.weight", "MLP down"),
        ("layers.1.blocks.0.attn.qkv.weight", "attention qkv"),
        ("something.else.weight", "other"),
    ],
)
def test_kinds_of_the_usual_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_what_is_no_matrix_is_told_by_its_shape() -> None:
    assert kind_of("model.layers.0.mlp.fc1.bias", 1) == "bias"
    assert kind_of("model.layers.0.input_layernorm.weight", 1) == "norm"
    assert kind_of("patch_embed.seq.0.c.weight", 4) == "convolution"


def test_depth_counts_layers_through_stages_and_towers() -> None:
    stages = [f"layers.{stage}.blocks.{block}.attn.qkv.weight" for stage, blocks in ((1, 2), (2, 11)) for block in range(blocks)]
    assert list(depths(stages).values()) == list(range(13))
    towers = [
        "vision_model.encoder.layers.0.x",
        "text_model.encoder.layers.0.x",
        "text_model.encoder.layers.10.x",
        "visual_projection.x",
    ]
    assert depths(towers) == dict(zip(towers, [2, 0, 1, None], strict=True))
