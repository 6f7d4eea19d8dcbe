"""Mixtures of experts: tensors that stack a matrix for every expert, and the routers that choose among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from acemerge.checkpoints.tensor_header import TensorHeader

# [expert, out, in] or [expert, in, out]: matrices that read what the layer is given, and those that write what it gives.
_READS = ("gate_up_proj", "gate_proj", "up_proj", "fc1.weight", "input_linear.weight", "w13_weight", "shared_w13_weight")
_WRITES = ("down_proj", "fc2.weight", "output_linear.weight", "w2_weight", "shared_w2_weight")
_IN_A_MIXTURE = ("*experts.*", "*.input_linear.weight", "*.output_linear.weight")

# Of which the files are [expert, in, out] where sizes do not tell.
_STORED_IN_OUT = frozenset("gpt_oss openai_privacy_filter llama4 llama4_text aria aria_text qwen3_vl_moe".split())

_ROUTERS = ("*router.weight", "*router.*.weight")
_GATES = ("gate.weight", "gate.weight_1", "gate.wg.weight", "gate.*.weight")  # ERNIE-VL has two: of text and of images


def stacked_matrices(name: str, header: TensorHeader) -> int:
    """How many matrices a tensor of a mixture stacks; 0 if it is no stack."""
    is_stack = len(header.shape) == 3 and any(fnmatchcase(name, pattern) for pattern in _IN_A_MIXTURE)
    return header.shape[0] if is_stack and name.endswith((*_READS, *_WRITES)) else 0


def stack_is_stored_in_out(name: str, tensors: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> bool:
    """Whether the matrices of a stack are stored [in, out].

    What a layer reads and writes has the model's hidden size, and so one of the two axes tells. Where both axes have that size,
    the other stacks of the module tell, which are stored alike; and where none does, the model type.
    """
    module = name[: -len(_ending(name))]
    alike = [name, *(other for other in tensors if other.startswith(module) and stacked_matrices(other, tensors[other]))]
    hidden, model_types = _known_of(config)
    for own in alike:
        rows, columns = tensors[own].shape[1:]
        if (rows == hidden) != (columns == hidden):
            inputs = rows if own.endswith(_READS) else columns
            return bool(inputs == hidden)
    return not _STORED_IN_OUT.isdisjoint(model_types)


def _ending(name: str) -> str:
    return next(ending for ending in (*_READS, *_WRITES) if name.endswith(ending))


def _known_of(config: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The hidden size of the language model, and the model types of the whole and of it."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    return text.get("hidden_size", config.get("hidden_size")), [str(part.get("model_type")) for part in (config, text)]


def is_router(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is the weight of a router: by its name, or a gate beside experts.

    >>> is_router("layers.0.mlp.gate.weight", {"layers.0.mlp.gate.weight", "layers.0.mlp.experts.0.up_proj.weight"})
    True
    >>> is_router("layers.0.mlp.gate.weight", {"layers.0.mlp.gate.weight", "layers.0.mlp.up_proj.weight"})
    False
    """
    if any(fnmatchcase(name, pattern) for pattern in _ROUTERS):
        return True
    layer, gate, rest = name.rpartition(".gate.")
    beside = f"{layer}.experts."
    is_gate = any(fnmatchcase(f"gate.{rest}", pattern) for pattern in _GATES)
    return bool(gate) and is_gate and any(other.startswith(beside) for other in names)
