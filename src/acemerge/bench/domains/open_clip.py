"""OpenCLIP's image encoders under transformers' names: `visual.*` with q, k and v in one matrix -> `vision_model.*`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from acemerge.checkpoints.folder import Checkpoint
from acemerge.errors import InputError

_BLOCK = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")
_OUTSIDE = {
    "class_embedding": "vision_model.embeddings.class_embedding",
    "positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "ln_post.weight": "vision_model.post_layernorm.weight",
    "ln_post.bias": "vision_model.post_layernorm.bias",
}
_INSIDE = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_HEAD_WIDTH = 64
"""Of every attention head of the OpenAI models."""


def is_open_clip(names: Iterable[str]) -> bool:
    """Whether these are an OpenCLIP model's tensors, wrapped or not."""
    return any("visual.transformer.resblocks." in name for name in names)


def vision_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The image encoder and its projection, as CLIPVisionModelWithProjection names them."""
    found: dict[str, Tensor] = {}
    for name in checkpoint.tensors:
        _, visual, inner = name.partition("visual.")
        if visual:
            found |= _renamed(inner, checkpoint.read(name), checkpoint)
    return found


def _renamed(name: str, tensor: Tensor, checkpoint: Checkpoint) -> dict[str, Tensor]:
    if name in _OUTSIDE:
        return {_OUTSIDE[name]: tensor}
    if name == "proj":
        return {"visual_projection.weight": tensor.T.contiguous()}
    if block := _BLOCK.fullmatch(name):
        layer = f"vision_model.encoder.layers.{block[1]}"
        if fused := re.fullmatch(r"attn\.in_proj_(weight|bias)", block[2]):
            parts = zip("qkv", tensor.chunk(3), strict=True)
            return {f"{layer}.self_attn.{letter}_proj.{fused[1]}": part.contiguous() for letter, part in parts}
        module, _, kind = block[2].rpartition(".")
        if module in _INSIDE:
            return {f"{layer}.{_INSIDE[module]}.{kind}": tensor}
    raise InputError(f"{checkpoint.where}: 'visual.{name}' is not a part of OpenCLIP's ViT; only its plain ViTs can be evaluated")


def vision_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """What CLIPVisionConfig needs, read off the tensors' shapes. OpenAI's weights go with quick_gelu."""
    shapes = {name.partition("visual.")[2]: header.shape for name, header in checkpoint.tensors.items() if "visual." in name}
    width, _, patch, _ = shapes["conv1.weight"]
    blocks = [int(match[1]) for name in shapes if (match := _BLOCK.fullmatch(name))]
    patches = shapes["positional_embedding"][0] - 1
    return {
        "hidden_size": width,
        "intermediate_size": shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        "num_hidden_layers": max(blocks) + 1,
        "num_attention_heads": max(1, width // _HEAD_WIDTH),
        "patch_size": patch,
        "image_size": patch * round(patches**0.5),
        "projection_dim": shapes["proj"][1],
        "hidden_act": "quick_gelu",
    }


def check_text_side(base: Checkpoint, expert: Checkpoint) -> None:
    """What is left of the text side in such files must be the base's: the encoder alone was fine-tuned."""
    for name in base.tensors:
        if "visual." not in name and name in expert.tensors and not base.read(name).equal(expert.read(name)):
            raise InputError(
                f"{expert.where}: '{name}' differs from the base's, but the text side should not have been trained; it is "
                "another base's fine-tune, or not one of an image encoder alone"
            )
