"""What the modules of a model say about its stored tensors: which belong to linear layers, and where they stand in the stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from acemerge.checkpoints.families import align_names
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError

Owner = tuple[nn.Module, str]
"""A module and the name that it has for one of its tensors."""

BEFORE = -1


@dataclass(frozen=True)
class Layout:
    """Of one expert's model, by the names in its files."""

    memory: Mapping[str, str]
    """Name in the file -> name in the model, for every tensor that the model uses."""
    linear: Mapping[str, bool]
    """The weights that only linear layers hold -> whether they are stored [in, out], as GPT-2's Conv1D."""
    stacks: tuple[str, ...]
    """The model's lists of blocks, outermost only: one for an encoder or a decoder."""
    blocks: int
    places: Mapping[str, int]
    """Which block a tensor belongs to: from 0, BEFORE the first, or `blocks` for what comes after the last."""


def read_layout(model: nn.Module, expert: Checkpoint) -> Layout:
    """Line up a model's tensors with the expert's file; neither is read, so the model may be without values."""
    tensors = all_tensors(model)
    headers = {name: TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    aligned = align_names(headers, expert.tensors)
    memory = {
        stored: name
        for stored, name in aligned.items()
        if name in headers and headers[name].shape == expert.tensors[stored].shape
    }
    _check_complete(model, expert, {id(tensors[name]) for name in memory.values()})
    owners = owners_of(model)
    linear = {}
    for stored, name in memory.items():
        orders = [_stored_in_out(module, attribute) for module, attribute in owners[id(tensors[name])]]
        if None not in orders and len(set(orders)) == 1:
            linear[stored] = bool(orders[0])
    stacks = _stacks(model)
    blocks = len(stacks[next(iter(stacks))]) if len(stacks) == 1 else 0
    places = _places(memory, tensors, next(iter(stacks)), blocks) if len(stacks) == 1 else {}
    return Layout(memory, linear, tuple(stacks), blocks, places)


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name they have."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def owners_of(model: nn.Module) -> dict[int, list[Owner]]:
    """By a tensor's identity, every module that holds it: a tied weight has several."""
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, attribute))
    return owners


def _check_complete(model: nn.Module, expert: Checkpoint, known: set[int]) -> None:
    unknown = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if unknown:
        raise InputError(
            f"expert {expert.where}: parameter '{unknown[0]}' of {type(model).__name__} is not a tensor of its file, so what it "
            "does with data cannot be told from the weights; give a whole model, saved by this version of transformers"
        )


def _stored_in_out(module: nn.Module, attribute: str) -> bool | None:
    """Of a linear layer's weight, the order of its axes; None for anything else."""
    if attribute != "weight":
        return None
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' own, which need not be installed
        return True
    # torch's MultiheadAttention never calls its output layer, a class of its own: its inputs cannot be seen.
    seen = isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return False if seen else None


def _stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of at least two modules with linear layers in them, the outermost ones."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        # The first stage of a picture model may be convolutions only.
        if isinstance(module, nn.ModuleList) and not inside and len(module) > 1 and all(map(_has_linear, module[1:])):
            found[name] = module
    return found


def _has_linear(block: nn.Module) -> bool:
    return any(_stored_in_out(module, "weight") is not None for module in block.modules())


def _places(memory: Mapping[str, str], tensors: Mapping[str, Tensor], stack: str, blocks: int) -> dict[str, int]:
    """Models list their modules in the order in which they run them."""
    order = {name: place for place, name in enumerate(tensors)}
    first = min(place for name, place in order.items() if name.startswith(f"{stack}."))
    places = {}
    for stored, name in memory.items():
        if name.startswith(f"{stack}."):
            places[stored] = int(name.removeprefix(f"{stack}.").split(".")[0])
        else:
            places[stored] = BEFORE if order[name] < first else blocks
    return places
