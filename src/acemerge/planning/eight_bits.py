"""Which matrices an output in 8 bits holds so, and with which scales: as the inputs have them, or in blocks of 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from acemerge.checkpoints.experts import is_router, stacked_matrices
from acemerge.checkpoints.families import Family, is_stored_in_out, is_task_head
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.quantised.eight_bits import EightBits, StoredInEightBits
from acemerge.checkpoints.quantised.scaled import SCALES
from acemerge.planning.as_adapter import is_linear
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.recipe import EIGHT_BITS, Recipe

_BLOCK = 128
_FAMILIES = ("llm",)
_ALIGNED = 4  # a file's float32 scales lie behind their matrix


def plan_in_eight_bits(
    tensors: Sequence[PlannedTensor], base: Checkpoint, experts: Sequence[Checkpoint], names: Sequence[Mapping[str, str]],
    family: Family, recipe: Recipe,
) -> tuple[list[PlannedTensor], Mapping[str, Any], list[str]]:  # fmt: skip
    """The same plan with matrices in 8 bits, the settings for config.json, and what stands against it."""
    if recipe.save_as == "adapter":
        return list(tensors), {}, [f"--dtype {EIGHT_BITS}: an adapter has no scales; give a float dtype"]
    headers = {tensor.name: tensor.header for tensor in tensors}
    found = _as_stored(base, experts, names) or _in_blocks(tensors, family)
    if found is None:
        return list(tensors), {}, [_nothing_to_go_by(family)]
    problems = [
        f"tensor '{name}' {list(headers[name].shape)}: cannot be written in 8 bits, its size is no multiple of {_ALIGNED}"
        for name in found.weights
        if name in headers and headers[name].elements % _ALIGNED
    ]
    planned = [_in_eight_bits(tensor, found.weights) for tensor in tensors]
    return planned, _of_weights_alone(found.settings), problems


def _in_eight_bits(tensor: PlannedTensor, weights: Mapping[str, EightBits]) -> PlannedTensor:
    """Merged in float32, so that it is rounded once."""
    own = weights.get(tensor.name)
    return replace(tensor, eight_bits=own, output_dtype="float32") if own else tensor


def _as_stored(base: Checkpoint, experts: Sequence[Checkpoint], names: Sequence[Mapping[str, str]]) -> StoredInEightBits | None:
    """As the first of the models that has any holds them, under the base's names."""
    if base.eight_bits:
        return base.eight_bits
    for expert, theirs in zip(experts, names, strict=True):
        if own := expert.eight_bits:
            return replace(own, weights={ours: own.weights[name] for ours, name in theirs.items() if name in own.weights})
    return None


def _in_blocks(tensors: Sequence[PlannedTensor], family: Family) -> StoredInEightBits | None:
    """Of float models: the linear layers of a language model, as DeepSeek's and Qwen's files have them.

    transformers undoes whole blocks only, and so a matrix that is not made of such stays as it is.
    """
    if family.name not in _FAMILIES or any(stacked_matrices(tensor.name, tensor.header) for tensor in tensors):
        return None
    headers = {tensor.name: tensor.header for tensor in tensors}
    linear = {
        tensor.name
        for tensor in tensors
        if is_linear(tensor, family) and not is_task_head(tensor.name) and not is_router(tensor.name, headers)
        and not is_stored_in_out(tensor.name, family, headers) and not any(size % _BLOCK for size in tensor.header.shape)
    }  # fmt: skip
    weights = {}
    for name in linear:
        rows, columns = headers[name].shape
        weights[name] = EightBits(SCALES[0], (rows // _BLOCK, columns // _BLOCK), (_BLOCK, _BLOCK))
    others = [name for name, header in headers.items() if len(header.shape) == 2 and name.endswith(".weight")]
    settings = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": sorted({"lm_head", *(name.removesuffix(".weight") for name in others if name not in linear)}),
    }  # fmt: skip
    return StoredInEightBits(settings, weights) if weights else None


def _of_weights_alone(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Scales of activations belong to the models that they were measured on: in the output they are found as the model runs."""
    found = dict(settings)
    if "activation_scheme" in found:
        found["activation_scheme"] = "dynamic"
    if found.get("kv_cache_scheme"):
        found["kv_cache_scheme"] = None
    if isinstance(groups := found.get("config_groups"), dict):
        found["config_groups"] = {name: _dynamic(group) for name, group in groups.items()}
    return found


def _dynamic(group: Any) -> Any:
    inputs = group.get("input_activations") if isinstance(group, dict) else None
    if not isinstance(inputs, dict):
        return group
    return {**group, "input_activations": {**inputs, "dynamic": True, "observer": None}}


def _nothing_to_go_by(family: Family) -> str:
    return (
        f"--dtype {EIGHT_BITS}: no model is stored in 8-bit floats, whose scales the output's would be like; and of float models "
        f"it takes linear layers of language models (preset llm, not '{family.name}') whose sizes are multiples of {_BLOCK}, "
        "with no experts stacked in one tensor. Give a float dtype, or an FP8 model among the inputs"
    )
