"""LoRA of parameters that stack a mixture's experts (`target_parameters`): a low-rank change for each expert of a 3-D tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.adapters.module import LoraModule
from acemerge.adapters.settings import CONFIG, EXPAND
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.checkpoints.untrusted import shortened
from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


_MOST = 5


@dataclass(frozen=True)
class StackedChange:
    """s B_e A_e of each expert e. Its parts lie side by side: A is (experts r) x in, B is out x (r experts)."""

    read: Callable[[str], Tensor]
    down: str
    up: str
    scale: float
    experts: int
    stored_in_out: bool
    is_low_rank = False

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the adapter's file."""
        return self.down, self.up

    def expand(self, base: Tensor) -> Tensor:  # noqa: ARG002
        """The change of the tensor as stored."""
        import torch

        A, B = self._factors()
        order = "ore,eri->eio" if self.stored_in_out else "ore,eri->eoi"
        return torch.einsum(order, B, A) * self.scale

    def expand_matrix(self, expert: int) -> Tensor:
        """The change of one expert's matrix as stored."""
        A, B = self._factors()
        change = B[:, :, expert] @ A[expert] * self.scale
        return change.T if self.stored_in_out else change

    def _factors(self) -> tuple[Tensor, Tensor]:
        """A as [expert, r, in] and B as [out, r, expert]."""
        A, B = (self.read(name) for name in (self.down, self.up))
        A, B = (factor if factor.dtype.itemsize >= 4 else factor.float() for factor in (A, B))
        return A.reshape(self.experts, -1, A.shape[1]), B.reshape(B.shape[0], -1, self.experts)


def take_stacked(
    modules: dict[str, dict[str, str]],
    stored: Mapping[str, TensorHeader],
    read: Callable[[str], Tensor],
    settings: Mapping[str, Any],
    base: Checkpoint,
    file: Path,
) -> dict[str, StackedChange]:
    """The changes of such parameters, by their names in the base; their modules are taken out of `modules`."""
    targets = settings.get("target_parameters")
    if not targets:
        return {}
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise InputError(f"{file.parent / CONFIG}: target_parameters must be a list of names; save the adapter again")
    if settings.get("rank_pattern") or settings.get("alpha_pattern"):
        raise InputError(
            f"{file.parent / CONFIG}: target_parameters together with rank or alpha patterns is not supported. {EXPAND}"
        )
    named = [name for name in base.tensors if name.endswith(tuple(f".{target}" for target in targets)) or name in targets]
    owners = {name.rpartition(".")[0]: None for name in named if len(base.tensors[name].shape) == 3}
    found: dict[str, StackedChange] = {}
    for owner in owners:
        parameters = [name for name in named if name.rpartition(".")[0] == owner]
        layers = [name for name in modules if name == owner or name.removeprefix(owner).replace(".base_layer", "") == ""]
        found |= _assigned(
            [LoraModule(layer, modules.pop(layer), stored, settings, file) for layer in layers], parameters, read, base, file
        )
    wrapped = tuple(target.rpartition(".")[0] for target in targets)
    if any(name.removesuffix(".base_layer").endswith(wrapped) for name in modules):  # a parameter that the base stores otherwise
        told = shortened(f"target_parameters={targets!r}")
        raise InputError(
            f"{file.parent / CONFIG}: {told} is not supported for a base without 3-D tensors of these names. {EXPAND}"
        )
    return found


def _assigned(
    layers: list[LoraModule], parameters: list[str], read: Callable[[str], Tensor], base: Checkpoint, file: Path
) -> dict[str, StackedChange]:
    """peft wraps a module once for each parameter, and does not store which is which: their shapes must tell."""
    ways: list[dict[str, StackedChange]] = []
    if len(parameters) > _MOST:
        raise InputError(f"{file}: more than {_MOST} parameters of one module is more than acemerge tells apart. {EXPAND}")
    for stored_in_out in (False, True):
        for chosen in permutations(parameters, len(layers)):
            changes = [
                _change(layer, read, base.tensors[name].shape, stored_in_out) for layer, name in zip(layers, chosen, strict=True)
            ]
            if layers and all(changes):
                ways.append({name: change for name, change in zip(chosen, changes, strict=True) if change})
    if len(ways) != 1:
        told = "do not fit" if not ways else "fit in more than one way"
        raise InputError(f"{file}: the factors of {', '.join(parameters)} {told} the base's tensors. {EXPAND}")
    return ways[0]


def _change(
    layer: LoraModule, read: Callable[[str], Tensor], shape: tuple[int, ...], stored_in_out: bool
) -> StackedChange | None:
    """The change, if its factors fit a tensor of this shape."""
    if layer.parts.keys() != {"lora_A", "lora_B"} or len(shape) != 3:
        return None
    down, up = layer.parts["lora_A"], layer.parts["lora_B"]
    experts, inputs, outputs = shape if stored_in_out else (shape[0], shape[2], shape[1])
    r = layer.settings.get("r")
    if not isinstance(r, int) or r < 1:
        return None
    A, B = layer.stored[down], layer.stored[up]
    if not (A.is_mergeable and B.is_mergeable and (A.shape, B.shape) == ((experts * r, inputs), (outputs, experts * r))):
        return None
    return StackedChange(read, down, up, layer.scale_of(r), experts, stored_in_out)
