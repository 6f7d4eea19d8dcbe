"""What is known of a tensor before it is read: its dtype and its shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# safetensors' names for dtypes -> torch's: what acemerge can read, since its output is in safetensors.
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
SAFETENSORS_NAME = {torch_name: name for name, torch_name in SAFETENSORS_DTYPES.items()}
MERGEABLE_DTYPES = ("float64", "float32", "float16", "bfloat16")


def element_size(dtype: str) -> int:
    """Bytes of one element of a torch dtype.

    >>> element_size("bfloat16"), element_size("float8_e4m3fn"), element_size("bool")
    (2, 1, 1)
    """
    if dtype == "bool":
        return 1
    if dtype == "bfloat16":
        return 2
    match = re.match(r"\D+(\d+)", dtype)
    assert match is not None, dtype
    return int(match[1]) // 8


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says about one tensor."""

    dtype: str
    shape: tuple[int, ...]
    made: bool = field(default=False, compare=False, kw_only=True)
    """Whether reading it makes its numbers from others, in memory; else it is a view of the mapped file."""

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes as stored."""
        return self.elements * element_size(self.dtype)

    @property
    def is_mergeable(self) -> bool:
        """Whether its numbers can be averaged: integers, booleans and 8-bit floats cannot."""
        return self.dtype in MERGEABLE_DTYPES


def header_of(tensor: Tensor) -> TensorHeader:
    """Of a tensor in memory."""
    return TensorHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def shared_storage(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that view exactly the same memory as an earlier name: tied weights in a torch.save file."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in state_dict.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        original = first.setdefault(memory, name)
        if original != name:
            tied[name] = original
    return tied
