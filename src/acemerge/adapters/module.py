"""One LoRA module of an adapter's file: which tensors it consists of, whether they are sound, and what they change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.adapters.change import BiasChange, LoraChange
from acemerge.adapters.settings import CONFIG, EXPAND, value_for
from acemerge.checkpoints.families import Family, is_stored_in_out
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.checkpoints.untrusted import shortened
from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_RANK = 2**16
_LARGEST_ALPHA = 1e9


@dataclass(frozen=True)
class LoraModule:
    """One module of the adapter: which tensors of its file it consists of, and what they say."""

    name: str
    parts: Mapping[str, str]
    stored: Mapping[str, TensorHeader]
    settings: Mapping[str, Any]
    file: Path
    parameter: str | None = None
    """The name of the parameter, where peft wraps a parameter and not a module: rank and alpha patterns go by it."""

    def of_parameter(self, name: str) -> LoraModule:
        """The same, as what changes this parameter."""
        return replace(self, parameter=name)

    @property
    def weight(self) -> str:
        """The name of the tensor it changes, in the model that the adapter was trained on."""
        return f"{self.name}.weight"

    @property
    def bias(self) -> str | None:
        """The name of B's bias in the file, if it has one."""
        return self.parts.get("lora_B.bias")

    @property
    def is_embedding(self) -> bool:
        """Whether it changes a lookup table, which is stored as W^T."""
        return "lora_embedding_A" in self.parts

    def _key(self, part: str) -> str:
        part = part.replace("lora_", "lora_embedding_") if self.is_embedding else part
        if part not in self.parts:
            raise InputError(f"{self.file}: module '{self.name}' has no {part}; the file is not whole, save it again")
        return self.parts[part]

    @property
    def header(self) -> TensorHeader:
        """Of W' - W, out x in (and further axes, if it is a convolution)."""
        self._refuse_other_parts()
        A, B = self.stored[self._key("lora_A")], self.stored[self._key("lora_B")]
        shapes = f"A is {list(A.shape)}, B is {list(B.shape)}"
        matrices = len(A.shape) >= 2 and len(B.shape) >= 2 and math.prod(B.shape[2:]) == 1
        if not matrices or A.shape[0] != B.shape[1] or not 0 < A.shape[0] <= _LARGEST_RANK:
            raise InputError(f"{self.file}: the factors of '{self.name}' do not fit each other: {shapes}; save it again")
        declared = self.declared_rank
        if declared != A.shape[0]:
            says = f"{CONFIG} says {shortened(repr(declared))}"
            raise InputError(f"{self.file}: '{self.name}' has rank {A.shape[0]}, {says}; save the adapter again")
        if not (A.is_mergeable and B.is_mergeable):
            raise InputError(f"{self.file}: the factors of '{self.name}' are {A.dtype} and {B.dtype}, not floating-point weights")
        self._check_vector("lora_magnitude_vector", "use_dora", B.shape[0])
        self._check_vector("lora_B.bias", "lora_bias", B.shape[0])
        wide = "float64" if "float64" in (A.dtype, B.dtype) else "float32"
        return TensorHeader(wide, (B.shape[0], *A.shape[1:]))

    def _refuse_other_parts(self) -> None:
        factors = ("lora_embedding_A", "lora_embedding_B") if self.is_embedding else ("lora_A", "lora_B", "lora_B.bias")
        strange = sorted(self.parts.keys() - {*factors, "lora_magnitude_vector"})
        if strange:
            raise unknown_kind(self.parts[strange[0]], self.file)

    def _check_vector(self, part: str, setting: str, length: int) -> None:
        """What a setting announces must be there, once per output; what it does not announce peft would not use."""
        announced = bool(self.settings.get(setting))
        if announced != (part in self.parts):
            has = "has no" if announced else "has a"
            raise InputError(
                f"{self.file}: module '{self.name}' {has} {part}, {CONFIG} says {setting}={announced}; save the adapter again"
            )
        if announced and (found := self.stored[self.parts[part]]).elements != length:
            raise InputError(
                f"{self.file}: the {part} of '{self.name}' has shape {list(found.shape)}, its module has {length} outputs; "
                "save the adapter again"
            )

    def is_idle(self, read: Callable[[str], Tensor]) -> bool:
        """Whether it was never trained: B is zero, and there is nothing else to it."""
        return len(self.parts) == 2 and not bool(read(self._key("lora_B")).any())

    def _scale(self) -> float:
        return self.scale_of(self.stored[self._key("lora_A")].shape[0])

    def scale_of(self, r: int) -> float:
        """What B A is multiplied by, of rank r."""
        alpha = self._setting("alpha_pattern", "lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < _LARGEST_ALPHA:
            problem = f"lora_alpha of '{self.name}' is {shortened(repr(alpha))}, not a number"
            raise InputError(f"{self.file.parent / CONFIG}: {problem}; save the adapter again")
        return alpha / (math.sqrt(r) if self.settings.get("use_rslora") else r)

    def change(self, read: Callable[[str], Tensor], ours: str, base: Checkpoint, family: Family) -> LoraChange:
        """What it does to the base's tensor of the name `ours`."""
        shape = self.header.shape
        stored_in_out = self.is_embedding or self._is_stored_in_out(shape, ours, base, family)
        return LoraChange(
            read, self._key("lora_A"), self._key("lora_B"), self._scale(), self.stored[self._key("lora_A")].shape[0],
            stored_in_out, shape[::-1] if stored_in_out else shape, self.name, self.is_embedding,
            self.parts.get("lora_magnitude_vector"), self.parameter is not None,
        )  # fmt: skip

    def _is_stored_in_out(self, shape: tuple[int, ...], ours: str, base: Checkpoint, family: Family) -> bool:
        """Where the base shows it, the base decides; `fan_in_fan_out` is one flag for modules that may differ."""
        if len(shape) != 2 or ours not in base.tensors or len(base.tensors[ours].shape) != 2:
            return False
        if shape[0] != shape[1]:
            return base.tensors[ours].shape == shape[::-1]
        known = family.stored_in_out or family.name != "generic"
        return is_stored_in_out(ours, family, base.tensors) if known else bool(self.settings.get("fan_in_fan_out"))

    @property
    def declared_rank(self) -> Any:
        """The rank that the settings give it."""
        return self._setting("rank_pattern", "r")

    def _setting(self, patterns: str, default: str) -> Any:
        return value_for(self.parameter or self.name, self.settings, patterns, default, self.file.parent / CONFIG)

    def bias_change(self, read: Callable[[str], Tensor]) -> BiasChange:
        """What it does to that module's bias."""
        assert self.bias is not None
        return BiasChange(read, self.bias, self._scale())


def unknown_kind(key: str, file: Path) -> InputError:
    """The refusal of a tensor that is no part of a LoRA module."""
    return InputError(f"{file}: tensor '{key}' belongs to a kind of adapter that acemerge does not read. {EXPAND}")
