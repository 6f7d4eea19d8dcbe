"""Numbers of 8 bits with scales: FP8 as DeepSeek and Qwen store it, and what compressed-tensors does not pack.

A weight is the stored number times its scale, in float32, rounded once to the model's own dtype. A scale belongs to a whole
matrix, to an output channel, or to a block of [rows, columns]. Files call it `weight_scale` or, though it multiplies too,
`weight_scale_inv`. Whole numbers may count from a zero point of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from acemerge.checkpoints.quantised.weights import ORIGINAL, FloatWeight, StoredModel, rows_at_once, whole_number
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import PreflightError

if TYPE_CHECKING:
    from torch import Tensor

Block = tuple[int, int]
SCALES = ("_scale_inv", "_scale")
_ZERO = "_zero_point"


def scaled_weights(model: StoredModel) -> list[FloatWeight]:
    """Every weight with a scale beside it, or every problem."""
    block = block_of(model.settings)
    kinds = ("float8",) if model.settings.get("quant_method") == "fp8" else ("float8", "int8", "uint8")
    found, problems = [], []
    for name, header in model.tensors.items():
        if header.is_mergeable or name.endswith(_ZERO):
            continue
        scale = next((name + suffix for suffix in SCALES if name + suffix in model.tensors), None)
        if scale is None and not header.dtype.startswith("float8"):
            continue
        if problem := _misfit(header, kinds, model.tensors[scale] if scale else None, block):
            problems.append(f"tensor '{name}' of {model.where} is {header.dtype} {list(header.shape)}, but {problem}")
        elif scale:
            zero = (name + _ZERO,) if name + _ZERO in model.tensors else ()
            floats = partial(dequantise, block=block, dtype=model.dtype)
            made = TensorHeader(model.dtype, header.shape, made=True)
            found.append(FloatWeight(name, made, (name, scale, *zero), floats, block))
    if problems:
        raise PreflightError(problems)
    return found


def dequantise(weight: Tensor, scale: Tensor, zero: Tensor | None = None, *, block: Block | None, dtype: str) -> Tensor:
    """Every number times the scale of its block. Only some rows at a time are held in float32."""
    import torch

    layout = scale_layout(tuple(weight.shape), tuple(scale.shape), block)
    assert layout is not None  # by its header
    *stacked, rows, columns = weight.shape
    result = torch.empty(weight.shape, dtype=getattr(torch, dtype))
    grids = [
        each.float().reshape(layout.grid).expand(*stacked, *layout.grid[-2:]).reshape(-1, *layout.grid[-2:])
        for each in (scale, zero if zero is not None else torch.zeros_like(scale))
    ]
    step = min(rows, rows_at_once(columns))
    floats = torch.empty(step, columns)  # used again and again: memory that comes and goes is what the allocator keeps most of
    for values, scales, zeros, out in zip(
        *(each.reshape(-1, *each.shape[-2:]) for each in (weight, *grids, result)), strict=True
    ):
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            of_rows = torch.arange(rows)[some] // layout.tall
            made = floats[: len(of_rows)].copy_(values[some])
            made.sub_(spread(zeros[of_rows], layout.wide, columns)).mul_(spread(scales[of_rows], layout.wide, columns))
            out[some] = made
    return result


def spread(grid: Tensor, wide: int, columns: int) -> Tensor:
    """A number for every column; one for all of a row is left to be so."""
    return grid if grid.shape[1] == 1 else grid.repeat_interleave(wide, dim=1)[:, :columns]


class Layout(NamedTuple):
    """How scales cover a matrix."""

    grid: tuple[int, ...]
    tall: int
    wide: int


def scale_layout(weight: tuple[int, ...], scale: tuple[int, ...], block: Block | None) -> Layout | None:
    """None if they do not fit. Several matrices may be stacked, each with its own scales."""
    if len(weight) < 2:
        return None
    *stacked, rows, columns = weight
    if prod(scale) == 1:
        return Layout((1,) * len(weight), rows, columns)
    if scale in ((*stacked, rows), (*stacked, rows, 1)):
        return Layout((*stacked, rows, 1), 1, columns)
    if stacked and scale in (tuple(stacked), (*stacked, 1, 1)):
        return Layout((*stacked, 1, 1), rows, columns)
    if block and scale == (*stacked, -(-rows // block[0]), -(-columns // block[1])):
        return Layout(scale, *block)
    return None


def _misfit(weight: TensorHeader, kinds: tuple[str, ...], scale: TensorHeader | None, block: Block | None) -> str | None:
    if scale is None:
        return f"has no scale beside it. {ORIGINAL}"
    if not weight.dtype.startswith(kinds):
        return f"this way to quantise has no such numbers. {ORIGINAL}"
    if not scale.is_mergeable or scale_layout(weight.shape, scale.shape, block) is None:
        blocks = f" and blocks of {list(block)}" if block else ""
        return f"its scale is {scale.dtype} {list(scale.shape)}, which does not fit{blocks}. {ORIGINAL}"
    return None


def block_of(settings: Mapping[str, Any]) -> Block | None:
    """The block that a scale belongs to, if the settings name one."""
    if settings.get("quant_method") == "fp8":
        return _pair(settings.get("weight_block_size"))
    blocks = set()
    for weights in weight_settings(settings):
        size = whole_number(weights.get("group_size"))
        blocks.add(_pair(weights.get("block_structure")) or ((1, size) if size else None))
    return blocks.pop() if len(blocks) == 1 else None


def weight_settings(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each of its groups."""
    groups = settings.get("config_groups")
    found = [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    return [weights for weights in found if isinstance(weights, dict)]


def _pair(block: Any) -> Block | None:
    if isinstance(block, list) and len(block) == 2 and all(map(whole_number, block)):
        return block[0], block[1]
    return None
