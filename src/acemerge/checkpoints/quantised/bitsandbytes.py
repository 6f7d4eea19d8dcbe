"""What bitsandbytes stores: 4 bits that choose from a table (nf4, fp4), with a scale for each block of numbers; or int8 with one
for each output. The scales of blocks may be quantised in turn ("double" or "nested").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.quantised.weights import ORIGINAL, FloatWeight, StoredModel, rows_at_once, whole_number
from acemerge.checkpoints.tensor_header import MERGEABLE_DTYPES, TensorHeader
from acemerge.checkpoints.untrusted import parse_json
from acemerge.errors import InputError, PreflightError

if TYPE_CHECKING:
    from torch import Tensor

_STATE = ".quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")
_MOST_STATE_BYTES = 4096
_PER_127 = 7.874015718698502e-3  # bitsandbytes' own constant, 1 / 127
_TWO = 2  # numbers in a byte
_MOST_AXES = 3


def bitsandbytes_weights(model: StoredModel) -> list[FloatWeight]:
    """Every weight, or every problem."""
    found: list[FloatWeight] = []
    problems: list[str] = []
    for name in model.tensors:
        try:
            if _STATE in name:
                found.append(_four_bit_weight(model, name))
            elif name.endswith(".SCB"):
                found.append(_int8_weight(model, name.removesuffix("SCB") + "weight"))
        except _MisfitError as error:
            problems.append(f"tensor '{name}' of {model.where}: {error}. {ORIGINAL}")
    if problems:
        raise PreflightError(problems)
    return [weight.turned() if model.turned(weight.name) else weight for weight in found]


class _MisfitError(ValueError):
    """A weight's parts are not as bitsandbytes writes them."""


# --- 4 bits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """What is said of a weight in words, as JSON in a tensor of bytes."""

    shape: tuple[int, ...]
    dtype: str
    block: int
    nested_block: int
    nested_offset: float

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.numbers // self.block)


def _four_bit_weight(model: StoredModel, state_name: str) -> FloatWeight:
    name = state_name.split(_STATE)[0]
    nested = f"{name}.{_NESTED[0]}" in model.tensors
    state = _state(model, state_name, nested)
    parts = (name, f"{name}.absmax", f"{name}.quant_map", *(f"{name}.{part}" for part in _NESTED if nested))
    sizes = (None, state.blocks, 16, *((-(-state.blocks // state.nested_block), 256) if nested else ()))
    for part, size in zip(parts, sizes, strict=True):
        header = model.tensors.get(part)
        if header is None or size not in (None, header.elements):
            raise _MisfitError(f"'{part}' is {'missing' if header is None else f'{list(header.shape)}, not [{size}]'}")
    if model.tensors[name].nbytes < -(-state.numbers // _TWO):
        raise _MisfitError(f"'{name}' holds less than the {list(state.shape)} numbers that it should")
    header = TensorHeader(state.dtype, state.shape, made=True)
    return FloatWeight(name, header, (*parts, state_name), partial(_from_four_bits, state))


def _state(model: StoredModel, name: str, nested: bool) -> _State:
    header = model.tensors[name]
    if header.dtype != "uint8" or header.nbytes > _MOST_STATE_BYTES:
        raise _MisfitError(f"is {header.dtype} {list(header.shape)}, not a few words")
    try:
        said = parse_json(bytes(model.read(name).flatten().tolist()), f"tensor '{name}' of {model.where}")
    except InputError:
        raise _MisfitError("does not hold what bitsandbytes writes there") from None
    said = said if isinstance(said, dict) else {}
    shape, dtype, offset = _shape(said.get("shape")), said.get("dtype"), said.get("nested_offset", 0.0)
    block, nested_block = whole_number(said.get("blocksize")), whole_number(said.get("nested_blocksize")) if nested else 1
    if not (shape and block and nested_block and dtype in MERGEABLE_DTYPES and isinstance(offset, float | int)):
        raise _MisfitError("does not hold what bitsandbytes writes there")
    return _State(shape, dtype, block, nested_block, float(offset))


def _shape(said: object) -> tuple[int, ...] | None:
    sizes = tuple(map(whole_number, said)) if isinstance(said, list) and len(said) <= _MOST_AXES else ()
    return tuple(size for size in sizes if size) if all(sizes) else None


def _from_four_bits(state: _State, packed: Tensor, scale: Tensor, table: Tensor, *rest: Tensor) -> Tensor:
    """The first of a byte's two numbers is in its upper half."""
    import torch

    *nested, _ = rest
    scales = _nested_scales(state, scale, *nested) if nested else scale.float()
    content = packed.contiguous().view(torch.uint8).flatten()
    result = torch.empty(state.numbers, dtype=getattr(torch, state.dtype))
    step = rows_at_once(_TWO * state.block) * _TWO * state.block
    for start in range(0, state.numbers, step):
        end = min(state.numbers, start + step)
        some = content[start // _TWO : -(-end // _TWO)]
        values = table[torch.stack((some >> 4, some & 15), dim=1).flatten()[: end - start].int()]
        of_blocks = scales[start // state.block : -(-end // state.block)]
        result[start:end] = values * of_blocks.repeat_interleave(state.block)[: end - start]
    return result.reshape(state.shape)


def _nested_scales(state: _State, scale: Tensor, nested_scale: Tensor, nested_table: Tensor) -> Tensor:
    wide = nested_scale.repeat_interleave(state.nested_block)[: state.blocks]
    return nested_table[scale.flatten().int()] * wide + state.nested_offset


# --- int8 --------------------------------------------------------------------------------------------------------------


def _int8_weight(model: StoredModel, name: str) -> FloatWeight:
    scale = name.removesuffix("weight") + "SCB"
    order = name.removesuffix("weight") + "weight_format"
    header = model.tensors.get(name)
    if header is None or header.dtype != "int8" or len(header.shape) != 2:
        raise _MisfitError(f"there is no int8 matrix '{name}' beside it")
    if model.tensors[scale].elements != header.shape[0]:
        raise _MisfitError(f"has {model.tensors[scale].elements} scales for {header.shape[0]} outputs")
    if order in model.tensors and model.read(order).flatten().tolist() not in ([0], []):
        raise _MisfitError(f"'{order}' says that numbers lie in the order of a GPU's tiles")
    made = TensorHeader(model.dtype, header.shape, made=True)
    parts = (name, scale, *(part for part in (order,) if part in model.tensors))
    return FloatWeight(name, made, parts, partial(_from_int8, model.dtype))


def _from_int8(dtype: str, numbers: Tensor, scale: Tensor, *_: Any) -> Tensor:
    import torch

    result = torch.empty(numbers.shape, dtype=getattr(torch, dtype))
    step = rows_at_once(numbers.shape[1])
    for start in range(0, len(numbers), step):
        some = slice(start, start + step)
        result[some] = numbers[some] * scale.flatten()[some, None] * _PER_127
    return result
