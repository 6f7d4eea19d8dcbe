"""GGUF, llama.cpp's files: the weights of language models, mostly quantised, by the library `gguf`.

A quantised tensor is read as float32, some rows at a time; what is stored in 16 or 32 bits stays so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.formats.registry import Format, WeightsFile
from acemerge.checkpoints.gguf_header import GgufHeader, GgufTensor, read_header
from acemerge.checkpoints.gguf_model import ROPE_FACTORS, Architecture, architecture_of, config_of, heads, llama3_rope
from acemerge.checkpoints.gguf_parts import all_parts, first_part, part_files
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_STORED_AS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_AT_ONCE = 4_000_000  # numbers: the library holds each several times while it makes floats of them


def _open(path: Path) -> WeightsFile:
    stamp = FileStamp.of(path)
    own = read_header(path)
    first = first_part(own)
    architecture = architecture_of(first)
    stored: dict[str, _Stored] = {}
    theirs: dict[str, str] = {}
    for name in own.tensors:
        if name != ROPE_FACTORS:
            names = architecture.transformers_names(own, name)
            stored |= zip(names, _stored(own, name, architecture).split(len(names)), strict=True)
            theirs |= dict.fromkeys(names, name)

    def config() -> dict[str, Any]:
        whole = all_parts(first)
        stated = config_of(whole, architecture)
        if ROPE_FACTORS in whole.tensors:
            factors = _stored(whole, ROPE_FACTORS, architecture)
            stated["rope_scaling"] = llama3_rope(whole, stated, factors.read().tolist())
        return {**stated, "dtype": _stored(whole, "token_embd.weight", architecture).dtype}

    def read(ours: str) -> Tensor:
        value = stored[ours].read()
        if architecture.norms_plus_one and theirs[ours].endswith("norm.weight"):
            return value - 1
        if architecture.is_in_out(theirs[ours]):
            return value.T.contiguous()
        return _turned_back(value, first, ours) if architecture.turned else value

    headers = {
        ours: TensorHeader(each.dtype, each.shape[::-1] if architecture.is_in_out(theirs[ours]) else each.shape, made=True)
        for ours, each in stored.items()
    }
    return WeightsFile(stamp, headers, read, config=config, held=lambda ours: stored[ours].held())


def _stored(header: GgufHeader, name: str, architecture: Architecture) -> _Stored:
    """A tensor of a file, or an error if it cannot be read."""
    place = header.tensors[name]
    return _Stored(place.path, place.start, architecture.transformers_shape(header, name), *_quantisation(name, place))


@dataclass(frozen=True)
class _Stored:
    """One tensor of a file."""

    path: Path
    start: int
    shape: tuple[int, ...]
    kind: Any
    """The library's GGMLQuantizationType."""
    row_bytes: int

    def split(self, count: int) -> list[_Stored]:
        """A stack of so many matrices as these; one is the tensor itself."""
        if count == 1 and len(self.shape) < 3:
            return [self]
        shape = self.shape[1:]
        size = prod(shape[:-1]) * self.row_bytes
        return [replace(self, start=self.start + number * size, shape=shape) for number in range(count)]

    @property
    def dtype(self) -> str:
        return _STORED_AS.get(self.kind.name, "float32")

    def read(self) -> Tensor:
        import torch
        from gguf.quants import dequantize

        content = self._mapped()
        rows, columns = len(content), self.shape[-1]
        result = torch.empty((rows, columns), dtype=getattr(torch, self.dtype))
        step = max(1, _AT_ONCE // columns)
        with np.errstate(all="ignore"):  # infinite scales of a damaged file are found later, by what they make
            for start in range(0, rows, step):
                result[start : start + step] = torch.from_numpy(dequantize(content[start : start + step], self.kind))
        return result.reshape(self.shape)

    def held(self) -> Tensor:
        """The bytes of its rows."""
        import torch

        return torch.from_numpy(self._mapped())

    def _mapped(self) -> np.ndarray:
        # Copy on write: nothing is ever written to it, but torch warns of arrays that cannot be.
        return np.memmap(self.path, np.uint8, "c", self.start, (prod(self.shape[:-1]), self.row_bytes))


def _quantisation(name: str, tensor: GgufTensor) -> tuple[Any, int]:
    """How a tensor is stored, and in how many bytes a row; or an error if it cannot be read or does not lie in the file."""
    path = tensor.path
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise InputError(f"{path}: reading GGUF files needs the library gguf: pip install gguf") from None
    try:
        kind = GGMLQuantizationType(tensor.quantisation)
        numbers, size = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise InputError(
            f"{path}: tensor {name!a} is quantised in a way that gguf cannot undo (type {tensor.quantisation}); install a newer "
            "gguf, or give the float model"
        ) from None
    row = tensor.shape[-1] if tensor.shape else 0
    if not prod(tensor.shape) or row % numbers or tensor.start + prod(tensor.shape) // numbers * size > path.stat().st_size:
        raise InputError(f"{path}: tensor {name!a} {list(tensor.shape)} does not fit into the file. Download it again.")
    return kind, row // numbers * size


def _turned_back(value: Tensor, header: GgufHeader, name: str) -> Tensor:
    """Rows of q and k as transformers has them: the halves of a head one after the other, not in turns."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return value
    count = heads(header, key=".k_proj." in name)
    pairs = value.reshape(count, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


FORMAT = Format((".gguf",), "model.gguf", _open, rank=50, parts=part_files, of_hugging_face=False)
