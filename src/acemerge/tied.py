"""Tied tensors: second names of one weight, merged once and stored once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acemerge.checkpoint import Checkpoint
from acemerge.families import matches

_OUTPUT_LAYERS = (
    "*lm_head.weight",
    "*lm_head.decoder.*",
    "*cls.predictions.decoder.*",
    "*encoder.embed_tokens.weight",
    "*decoder.embed_tokens.weight",
)
_INPUT_EMBEDDINGS = ("*embed_tokens.weight", "*wte.weight", "*shared.weight", "*word_embeddings.weight", "*embed_in.weight")


def tied_names(model: Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """Names that stand for another tensor -> that tensor: same storage, or an output layer that the config ties."""
    tied = _rooted_at_inputs(model.tied)
    if config.get("tie_word_embeddings") is True:
        inputs = [name for name in model.tensors if matches(name, _INPUT_EMBEDDINGS) and name not in tied]
        source = min(inputs, key=lambda name: (not name.endswith("shared.weight"), len(name)), default=None)
        for name, header in model.tensors.items():
            if source not in (None, name) and matches(name, _OUTPUT_LAYERS) and header == model.tensors[source or name]:
                tied[name] = source or name
    return tied


def _rooted_at_inputs(shared_storage: Mapping[str, str]) -> dict[str, str]:
    """The same groups of names, each led by one that is not an output layer, whichever name the file lists first."""
    groups: dict[str, list[str]] = {}
    for copy, original in shared_storage.items():
        groups.setdefault(original, [original]).append(copy)
    tied = {}
    for names in groups.values():
        root = next((name for name in names if not matches(name, _OUTPUT_LAYERS)), names[0])
        tied.update({name: root for name in names if name != root})
    return tied
