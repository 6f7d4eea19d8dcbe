"""Quantised models: 8-bit floats with scales are read as the floats they stand for, one tensor at a time; others are refused.

A weight is the stored number times its scale, in float32, rounded once to the model's own dtype. A scale belongs to a whole
matrix, to an output channel, or to a block of [rows, columns]. Files call it `weight_scale` or, though it multiplies too,
`weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from acemerge.checkpoints.tensor_header import MERGEABLE_DTYPES, TensorHeader
from acemerge.errors import InputError, PreflightError

if TYPE_CHECKING:
    from torch import Tensor

QUANTIZATION = "quantization_config"
"""What config.json calls it."""

_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale")
"""Scales of what flows through a layer: a float model has none."""
_ROWS_AT_ONCE = 1024

_ORIGINAL = "Give the float model that it was made from"
_BY_TRANSFORMERS = "load it with transformers where {} is installed, then model.dequantize() and model.save_pretrained(FOLDER)"
_REFUSED = {
    "bitsandbytes": f"by bitsandbytes. {_ORIGINAL}; or {_BY_TRANSFORMERS.format('bitsandbytes')}",
    "gptq": f"by GPTQ. {_ORIGINAL}: its card names it as base_model",
    "awq": f"by AWQ. {_ORIGINAL}: its card names it as base_model",
    "mxfp4": f"to MXFP4. {_ORIGINAL}; or load it with transformers' Mxfp4Config(dequantize=True) and save_pretrained(FOLDER)",
}


def dequantised(
    config: Mapping[str, Any], stored: Mapping[str, TensorHeader], read: Callable[[str], Tensor], where: str
) -> tuple[dict[str, TensorHeader], Callable[[str], Tensor]]:
    """The float tensors that a quantised model's stored ones stand for, and how one is read; or an error that says what to do."""
    block = _block(config[QUANTIZATION], where)
    dtype = next((own for key in ("dtype", "torch_dtype") if (own := config.get(key)) in MERGEABLE_DTYPES), "bfloat16")
    scale_of = _scales(stored, block, where)
    gone = {*scale_of.values(), *(name for name in stored if name.endswith(_OF_ACTIVATIONS))}
    headers = {
        name: TensorHeader(dtype, header.shape) if name in scale_of else header
        for name, header in stored.items()
        if name not in gone
    }

    def read_as_floats(name: str) -> Tensor:
        return dequantise(read(name), read(scale_of[name]), block, dtype) if name in scale_of else read(name)

    return headers, read_as_floats


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: str) -> Tensor:
    """Every number times the scale of its block. Only some rows at a time are held in float32."""
    import torch

    layout = _layout(tuple(weight.shape), tuple(scale.shape), block)
    assert layout is not None  # by its header
    *stacked, rows, columns = weight.shape
    result = torch.empty(weight.shape, dtype=getattr(torch, dtype))
    scales = scale.float().reshape(layout.grid).expand(*stacked, *layout.grid[-2:])
    for values, own, out in zip(*(each.reshape(-1, *each.shape[-2:]) for each in (weight, scales, result)), strict=True):
        for start in range(0, rows, _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            of_rows = own[torch.arange(rows)[some] // layout.tall]
            out[some] = values[some].float() * of_rows.repeat_interleave(layout.wide, dim=1)[:, :columns]
    return result


class _Layout(NamedTuple):
    """How scales cover a matrix."""

    grid: tuple[int, ...]
    tall: int
    wide: int


def _layout(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> _Layout | None:
    """None if they do not fit. Several matrices may be stacked, each with its own scales."""
    if len(weight) < 2:
        return None
    *stacked, rows, columns = weight
    if prod(scale) == 1:
        return _Layout((1,) * len(weight), rows, columns)
    if scale in ((*stacked, rows), (*stacked, rows, 1)):
        return _Layout((*stacked, rows, 1), 1, columns)
    if stacked and scale in (tuple(stacked), (*stacked, 1, 1)):
        return _Layout((*stacked, 1, 1), rows, columns)
    if block and scale == (*stacked, -(-rows // block[0]), -(-columns // block[1])):
        return _Layout(scale, *block)
    return None


def _scales(stored: Mapping[str, TensorHeader], block: tuple[int, int] | None, where: str) -> dict[str, str]:
    """Name of an 8-bit weight -> that of its scale."""
    found, problems = {}, []
    for name, header in stored.items():
        if header.is_mergeable:
            continue
        scale = next((name + suffix for suffix in _SCALES if name + suffix in stored), None)
        if header.dtype.startswith("float8"):
            if problem := _misfit(header, stored[scale] if scale else None, block):
                problems.append(f"tensor '{name}' of {where} is {header.dtype} {list(header.shape)}, but {problem}")
            elif scale:
                found[name] = scale
        elif scale:
            problems.append(f"tensor '{name}' of {where} is quantised to {header.dtype}, which acemerge cannot undo. {_ORIGINAL}")
    if problems:
        raise PreflightError(problems)
    return found


def _misfit(weight: TensorHeader, scale: TensorHeader | None, block: tuple[int, int] | None) -> str | None:
    if scale is None:
        return f"has no scale beside it. {_ORIGINAL}"
    if not scale.is_mergeable or _layout(weight.shape, scale.shape, block) is None:
        blocks = f" and blocks of {list(block)}" if block else ""
        return f"its scale is {scale.dtype} {list(scale.shape)}, which does not fit{blocks}. {_ORIGINAL}"
    return None


def _block(settings: Any, where: str) -> tuple[int, int] | None:
    """The block that a scale belongs to, if the settings of a readable format name one."""
    if not isinstance(settings, dict):
        raise InputError(f"{where} is quantised in an unknown way (config.json: {QUANTIZATION}). {_ORIGINAL}")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "fp8":
        return _pair(settings.get("weight_block_size"))
    if method == "compressed-tensors" and settings.get("format") == "float-quantized":
        groups = settings.get("config_groups")
        weights = [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
        blocks = {pair for each in weights if isinstance(each, dict) and (pair := _pair(each.get("block_structure")))}
        return blocks.pop() if len(blocks) == 1 else None
    if isinstance(method, str) and method in _REFUSED:
        raise InputError(f"{where} is quantised {_REFUSED[method]}")
    named = f"{method}, format {settings['format']}" if settings.get("format") else method
    raise InputError(f"{where} is quantised by a method that acemerge does not read ({named}). {_ORIGINAL}")


def _pair(block: Any) -> tuple[int, int] | None:
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    return None
