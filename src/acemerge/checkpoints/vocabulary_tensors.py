"""Which tensors have a row for every token: embeddings, output layers and their biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from acemerge.checkpoints.families import matches
from acemerge.checkpoints.folder import Checkpoint

_EMBEDDINGS = (
    "*embed_tokens.weight",
    "*wte.weight",
    "*word_embeddings.weight",
    "*shared.weight",
    "*embed_in.weight",
    "*tok_embeddings.weight",
    "*token_embedding.weight",
    "*tokens_embed.weight",
    "*word_embedding.weight",
    "*backbone.embeddings.weight",
)
_OUTPUT_LAYERS = (
    "*lm_head.weight",
    "*lm_head.bias",
    "*lm_head.decoder.*",
    "*embed_out.weight",
    "*cls.predictions.bias",
    "*predictions.bias",
    "*predictions.decoder.*",
    "*vocab_projector.*",
    "*generator_lm_head.*",
    "*lm_loss.*",
    "*proj_out.weight",
    "decoder.weight",
    "decoder.bias",
    "*embed_tokens_per_layer.weight",
)
_SIDEWAYS = ("*final_logits_bias",)
"""Stored [1, tokens]."""


def vocabulary_axes(model: Checkpoint, config: Mapping[str, Any]) -> dict[str, int]:
    """Tensors with a row for every token -> the axis along which these lie: by name, and as long as the model's vocabulary."""
    sizes = {model.tensors[name].shape[0] for name in _embeddings(model)} | set(vocabulary_sizes(config))
    found = [(name, header.shape, _axis(name)) for name, header in model.tensors.items()]
    return {name: axis for name, shape, axis in found if axis is not None and axis < len(shape) and shape[axis] in sizes}


def embedding_rows(model: Checkpoint) -> int | None:
    """How many rows its embeddings have; None if it has none."""
    return next((model.tensors[name].shape[0] for name in _embeddings(model)), None)


def vocabulary_sizes(config: Mapping[str, Any]) -> Iterator[int]:
    """What a config says of them, also those of its parts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from vocabulary_sizes(value)
        elif key.startswith("vocab_size") and isinstance(value, int):
            yield value


def _embeddings(model: Checkpoint) -> list[str]:
    return [name for name, header in model.tensors.items() if len(header.shape) == 2 and matches(name, _EMBEDDINGS)]


def _axis(name: str) -> int | None:
    if matches(name, (*_EMBEDDINGS, *_OUTPUT_LAYERS)):
        return 0
    return 1 if matches(name, _SIDEWAYS) else None
