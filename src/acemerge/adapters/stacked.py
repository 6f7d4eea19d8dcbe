"""LoRA of parameters that stack a mixture's experts (`target_parameters`): a low-rank change for each expert of a 3-D tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from acemerge.adapters.change import at_least_float32
from acemerge.adapters.module import LoraModule
from acemerge.adapters.settings import EXPAND
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
    rank: int
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

        A, B = map(at_least_float32, self._factors())
        order = "ore,eri->eio" if self.stored_in_out else "ore,eri->eoi"
        return torch.einsum(order, B, A) * self.scale

    def expand_matrix(self, expert: int) -> Tensor:
        """The change of one expert's matrix as stored."""
        left, right = self.factors_of(expert)
        return left @ right * self.scale

    def factors_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """What the change of one expert's matrix as stored is the product of, but for the scale."""
        A, B = self._factors()
        down, up = at_least_float32(A[expert]), at_least_float32(B[:, :, expert])
        return (down.T, up.T) if self.stored_in_out else (up, down)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """A as [expert, r, in] and B as [out, r, expert]."""
        A, B = (self.read(name) for name in (self.down, self.up))
        return A.reshape(self.experts, -1, A.shape[1]), B.reshape(B.shape[0], -1, self.experts)


def take_stacked(
    modules: dict[str, LoraModule],
    parameters: Mapping[str, tuple[int, ...]],
    targets: Sequence[str],
    read: Callable[[str], Tensor],
) -> dict[str, StackedChange]:
    """The changes of such parameters, of these names and shapes in the model; their modules are taken out of `modules`."""
    named = [name for name in parameters if is_target(name, targets)]
    found: dict[str, StackedChange] = {}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in named):
        layers = [name for name in modules if name == owner or name.removeprefix(owner).replace(".base_layer", "") == ""]
        own = {name: parameters[name] for name in named if name.rpartition(".")[0] == owner}
        if layers:
            found |= _assigned([modules.pop(layer) for layer in layers], own, read)
    return found


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Whether peft takes a parameter of this name for one of the targets."""
    return name in targets or name.endswith(tuple(f".{target}" for target in targets))


def _assigned(
    layers: list[LoraModule], parameters: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> dict[str, StackedChange]:
    """peft wraps a module once for each parameter, and does not store which is which: their shapes must tell."""
    file, names = layers[0].file, ", ".join(parameters)
    if len(parameters) > _MOST:
        raise InputError(f"{file}: more than {_MOST} parameters of one module is more than acemerge tells apart. {EXPAND}")
    ways: list[dict[str, StackedChange]] = []
    for stored_in_out in (False, True):
        for chosen in permutations(parameters, len(layers)):
            changes = {
                name: _change(layer.of_parameter(name), parameters[name], read, stored_in_out)
                for layer, name in zip(layers, chosen, strict=True)
            }
            if all(changes.values()):
                ways.append({name: change for name, change in changes.items() if change})
    if len(ways) != 1:
        told = "do not fit" if not ways else "fit in more than one way"
        raise InputError(f"{file}: the factors of {names} {told} the base's tensors. {EXPAND}")
    return ways[0]


def _change(
    layer: LoraModule, shape: tuple[int, ...], read: Callable[[str], Tensor], stored_in_out: bool
) -> StackedChange | None:
    """The change, if its factors fit a tensor of this shape."""
    if layer.parts.keys() != {"lora_A", "lora_B"}:
        return None
    down, up = layer.parts["lora_A"], layer.parts["lora_B"]
    experts, inputs, outputs = shape if stored_in_out else (shape[0], shape[2], shape[1])
    r = layer.declared_rank
    if not isinstance(r, int) or r < 1:
        return None
    A, B = layer.stored[down], layer.stored[up]
    if not (A.is_mergeable and B.is_mergeable and (A.shape, B.shape) == ((experts * r, inputs), (outputs, experts * r))):
        return None
    return StackedChange(read, down, up, layer.scale_of(r), r, experts, stored_in_out)
