"""Whole numbers of few bits, packed into words of 32: GPTQ, AWQ, and what compressed-tensors packs.

A weight is (number - zero) * scale; every group of inputs has a scale and a zero for each output. Numbers lie in the words one
after another, the lowest bits first. AWQ has the eight of a word in an order of its own; GPTQ mostly stores zeros less one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from acemerge.checkpoints.quantised.scaled import weight_settings
from acemerge.checkpoints.quantised.weights import ORIGINAL, FloatWeight, StoredModel, rows_at_once, whole_number
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError, PreflightError

if TYPE_CHECKING:
    from torch import Tensor

_WORD = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight outputs lies."""


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """So many numbers from each row of words; one may begin in a word and end in the next."""
    import torch

    at = torch.arange(count) * bits
    word, offset = at // _WORD, at % _WORD
    wide = words.long() & (2**_WORD - 1)
    following = (word + 1).clamp(max=words.shape[1] - 1)
    joined = torch.bitwise_or(wide[:, word] >> offset, wide[:, following] << (_WORD - offset))
    return torch.bitwise_and(joined, 2**bits - 1)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


# --- GPTQ and AWQ: [in, out], and packed so -----------------------------------------------------------------------------


def gptq_weights(model: StoredModel) -> list[FloatWeight]:
    """Every `qweight`: words of inputs, for each output."""
    bits = model.settings.get("bits")
    if bits not in (2, 3, 4, 8):
        raise InputError(f"{model.where} is quantised by GPTQ to {bits!r} bits, which acemerge does not read. {ORIGINAL}")
    added = 0 if model.settings.get("checkpoint_format") == "gptq_v2" else 1

    def of(module: str, outputs: int) -> tuple[int, Callable[..., Tensor]]:
        words, indices = model.tensors[f"{module}.qweight"], model.tensors.get(f"{module}.g_idx")
        inputs = indices.elements if indices else words.shape[0] * _WORD // bits
        fits = words.shape == (_words(inputs, bits), outputs)
        return (inputs if fits else 0), partial(_gptq, bits=bits, added=added, dtype=model.dtype)

    return _of_modules(model, bits, of)


def _gptq(
    words: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor | None = None, *, bits: int, added: int, dtype: str
) -> Tensor:
    groups, outputs = scales.shape
    inputs = len(group_of) if group_of is not None else words.shape[0] * _WORD // bits
    zero = ((unpacked(zeros, bits, outputs) + added) & (2**bits - 1)).T
    return _weighed(
        lambda some: unpacked(words[:, some].T, bits, inputs), zero, scales.T, _groups(group_of, inputs, groups), dtype
    )


def awq_weights(model: StoredModel) -> list[FloatWeight]:
    """Every `qweight`: words of eight outputs, for each input."""
    bits = model.settings.get("bits", model.settings.get("w_bit"))
    version = str(model.settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise InputError(
            f"{model.where} is quantised by AWQ to {bits!r} bits, version {version!a}; only 4 bits, gemm, is read. {ORIGINAL}"
        )

    def of(module: str, outputs: int) -> tuple[int, Callable[..., Tensor]]:
        inputs, words = model.tensors[f"{module}.qweight"].shape
        return (inputs if words * 8 == outputs else 0), partial(_awq, dtype=model.dtype)

    return _of_modules(model, 4, of)


def _awq(words: Tensor, zeros: Tensor, scales: Tensor, *, dtype: str) -> Tensor:
    inputs, outputs = words.shape[0], scales.shape[1]

    def codes(some: slice, packed: Tensor = words) -> Tensor:
        of_outputs = unpacked(packed[:, some.start // 8 : -(-some.stop // 8)], 4, some.stop - some.start)
        return of_outputs.reshape(len(packed), -1, 8)[:, :, _AWQ_PLACES].reshape(len(packed), -1).T

    zero = codes(slice(0, outputs), zeros)
    return _weighed(codes, zero, scales.T, _groups(None, inputs, len(scales)), dtype)


def _of_modules(model: StoredModel, bits: int, of: Callable[[str, int], tuple[int, Callable[..., Tensor]]]) -> list[FloatWeight]:
    """The weights of all modules, by their sizes; `of` tells the number of inputs, none if sizes do not fit."""
    found, problems = [], []
    for name in model.tensors:
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        parts = [name, f"{module}.qzeros", f"{module}.scales", f"{module}.g_idx"]
        if parts[3] not in model.tensors:
            del parts[3]
        missing = [part for part in parts if part not in model.tensors]
        headers = [model.tensors[part] for part in parts if part not in missing]
        shaped = not missing and all(len(header.shape) == 2 for header in headers[:3])
        groups, outputs = headers[2].shape if shaped else (0, 0)
        inputs, floats = of(module, outputs) if shaped else (0, _gptq)
        whole_groups = len(parts) == 4 or (groups and inputs % groups == 0)
        if not inputs or not whole_groups or headers[1].shape != (groups, _words(outputs, bits)):
            problems.append(_misfit(model, name, missing))
            continue
        weight = FloatWeight(f"{module}.weight", TensorHeader(model.dtype, (outputs, inputs), made=True), tuple(parts), floats)
        found.append(weight.turned() if model.turned(weight.name) else weight)
    if problems:
        raise PreflightError(problems)
    return found


def _misfit(model: StoredModel, name: str, missing: list[str]) -> str:
    header = model.tensors[name]
    why = f"has no '{missing[0]}' beside it" if missing else "sizes of its scales and zeros do not fit"
    return f"tensor '{name}' of {model.where} is {header.dtype} {list(header.shape)}, but {why}. {ORIGINAL}"


# --- compressed-tensors: [out, in], packed along the inputs -------------------------------------------------------------


def packed_weights(model: StoredModel) -> list[FloatWeight]:
    """Every `weight_packed`; numbers are signed, and so are zeros."""
    known = sorted({bits for each in weight_settings(model.settings) if (bits := whole_number(each.get("num_bits")))})
    found, problems = [], []
    for name, header in model.tensors.items():
        if not name.endswith(".weight_packed"):
            continue
        module = name.removesuffix("_packed")
        optional = [part for part in (f"{module}_zero_point", f"{module}_g_idx") if part in model.tensors]
        parts = (name, f"{module}_scale", f"{module}_shape", *optional)
        missing = [part for part in parts if part not in model.tensors]
        shape = () if missing else tuple(int(size) for size in model.read(parts[2]).flatten().tolist()[:2])
        bits = next(
            (bits for bits in known if bits <= 8 and len(shape) == 2 and header.shape == (shape[0], _words(shape[1], bits))), 0
        )
        if not bits or not _scales_fit(model.tensors[parts[1]].shape, (shape[0], shape[1])):
            problems.append(_misfit(model, name, missing))
            continue
        floats = partial(_packed, bits=bits, names=tuple(part.removeprefix(module) for part in parts), dtype=model.dtype)
        found.append(FloatWeight(module, TensorHeader(model.dtype, (shape[0], shape[1]), made=True), parts, floats))
    if problems:
        raise PreflightError(problems)
    return found


def _scales_fit(scales: tuple[int, ...], weight: tuple[int, int]) -> bool:
    return scales in ((1,), (weight[0],)) or (len(scales) == 2 and scales[0] == weight[0] and weight[1] % scales[1] == 0)


def _packed(*parts: Tensor, bits: int, names: tuple[str, ...], dtype: str) -> Tensor:
    import torch

    part = dict(zip(names, parts, strict=True))
    words, middle = part["_packed"], 2 ** (bits - 1)
    outputs, inputs = map(int, part["_shape"].tolist())
    scales = part["_scale"].reshape(-1, part["_scale"].shape[-1] if part["_scale"].dim() == 2 else 1).expand(outputs, -1)
    zero = torch.full(scales.shape, middle)
    if "_zero_point" in part:
        zero = unpacked(part["_zero_point"].T, bits, outputs).T
    groups = _groups(part.get("_g_idx"), inputs, scales.shape[1])
    return _weighed(lambda some: unpacked(words[some], bits, inputs), zero, scales, groups, dtype)


# --- all of them --------------------------------------------------------------------------------------------------------


def _groups(group_of: Tensor | None, inputs: int, groups: int) -> Tensor:
    """The group of every input."""
    import torch

    if group_of is None:
        return torch.arange(inputs) // (inputs // groups)
    if len(group_of) and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise IndexError(f"inputs belong to groups beyond the {groups} that have a scale")
    return group_of.long()


def _weighed(codes: Callable[[slice], Tensor], zeros: Tensor, scales: Tensor, group_of: Tensor, dtype: str) -> Tensor:
    """(number - zero) * scale, [out, in], with some outputs' numbers at a time."""
    import torch

    outputs, inputs = len(scales), len(group_of)
    result = torch.empty(outputs, inputs, dtype=getattr(torch, dtype))
    step = rows_at_once(inputs, multiple=8)
    for start in range(0, outputs, step):
        some = slice(start, min(outputs, start + step))
        result[some] = (codes(some) - zeros[some][:, group_of]).float() * scales[some].float()[:, group_of]
    return result
