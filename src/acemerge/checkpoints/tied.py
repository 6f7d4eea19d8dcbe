"""Tied tensors: second names of one weight, merged once and stored once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from acemerge.checkpoints.families import matches
from acemerge.checkpoints.folder import Checkpoint

_OUTPUT_LAYERS = (
    "*lm_head.weight",
    "*lm_head.decoder.*",
    "*cls.predictions.decoder.*",
    "*encoder.embed_tokens.weight",
    "*decoder.embed_tokens.weight",
)
INPUT_EMBEDDINGS = ("*embed_tokens.weight", "*wte.weight", "*shared.weight", "*word_embeddings.weight", "*embed_in.weight")


def tied_names(model: Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """Names that stand for another tensor -> that tensor: same storage, or an output layer that the config ties."""
    tied = _rooted_at_inputs(model.tied)
    if config.get("tie_word_embeddings") is True:
        source = _input_embeddings(model, tied)
        for name, header in model.tensors.items():
            if source in (None, name) or not matches(name, _OUTPUT_LAYERS) or header != model.tensors[source or name]:
                continue
            # Some classes never tie what their config says: a copy with values of its own is a weight of its own.
            if model.read(name).equal(model.read(source or name)):
                tied[name] = source or name
    return tied


def output_layers_tied_by_expert(base: Checkpoint, expert: Checkpoint, found: Collection[str]) -> dict[str, str]:
    """Output layers that the base stores and an expert of the same architecture ties: the base's name -> what stands for it.

    `found` are the base's tensors that the expert has under a name of their own.
    """
    architecture = base.config.get("architectures")
    if expert.changes is not None or not architecture or expert.config.get("architectures") != architecture:
        return {}
    if expert.config.get("tie_word_embeddings") is False:
        return {}
    source = _input_embeddings(expert, ())
    absent = [name for name in base.tensors if matches(name, _OUTPUT_LAYERS) and name not in found]
    # A larger vocabulary has more rows.
    return {name: source for name in absent if source and expert.tensors[source].shape[1:] == base.tensors[name].shape[1:]}


def _input_embeddings(model: Checkpoint, leaving_out: Collection[str]) -> str | None:
    inputs = [name for name in model.tensors if matches(name, INPUT_EMBEDDINGS) and name not in leaving_out]
    return min(inputs, key=lambda name: (not name.endswith("shared.weight"), len(name)), default=None)


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
