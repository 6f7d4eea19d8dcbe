"""Checkpoints: what the headers say, and lazy reads of one tensor at a time.

Opening one reads headers only. Reading a tensor gives a view of the memory-mapped file: its pages belong to the page cache,
not to this process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.untrusted import (
    MAX_JSON_BYTES,
    check_header_length,
    check_inside,
    check_names,
    check_not_pointer,
    check_plain,
    check_zip,
    parse_json,
    read_bounded,
    safetensors_header,
)
from acemerge.errors import InputError, PreflightError

if TYPE_CHECKING:
    from torch import Tensor

    from acemerge.adapters.change import Change

# safetensors' names for dtypes -> torch's, and the size of one element in bytes.
_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
SAFETENSORS_NAME = {torch_name: name for name, torch_name in _SAFETENSORS_DTYPES.items()}
MERGEABLE_DTYPES = ("float64", "float32", "float16", "bfloat16")

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<kind>safetensors|bin)")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_DEEPEST_WRAPPING = 8
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


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


@dataclass(frozen=True)
class Checkpoint:
    """One model: its tensors' headers in file order, and a way to read each lazily."""

    name: str
    tensors: Mapping[str, TensorHeader]
    read: Callable[[str], Tensor]
    location: Path | None = None
    files: tuple[Path, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    """Tensors stored under a second name, -> the first name."""
    changes: Mapping[str, Change] | None = None
    """Of an adapter: tensors given as a change of the base's. Its others are values, and what it does not have is the base's."""
    stamps: tuple[FileStamp, ...] = ()

    def check_unchanged(self) -> None:
        """Raise an error if a file has changed since it was opened."""
        for stamp in self.stamps:
            stamp.check()

    @property
    def folder(self) -> Path | None:
        """The folder whose other files (config, tokenizer) belong to this model; none for a bare weights file."""
        return self.location if self.location is not None and self.location.is_dir() else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json, or nothing."""
        path = self.folder / "config.json" if self.folder else None
        if path is None or not path.is_file():
            return {}
        return read_json(path)

    @cached_property
    def where(self) -> str:
        """How messages name it."""
        return f"'{self.name}' ({self.location})" if self.location else f"'{self.name}'"

    def stored(self, name: str) -> list[tuple[str, Tensor]]:
        """What the files hold for a tensor, by the names there: its value, or what its change is made of."""
        change = self.changes.get(name) if self.changes else None
        return [(key, change.read(key)) for key in change.stored_names] if change else [(name, self.read(name))]

    def side_files(self) -> Iterator[Path]:
        """Files beside the weights, at the folder's top level: config, tokenizer, preprocessor, chat template..."""
        if self.folder is None:
            return
        for path in sorted(self.folder.iterdir()):
            is_weights = path.name.endswith((*WEIGHT_SUFFIXES, ".index.json", ".h5", ".msgpack", ".onnx", ".gguf"))
            hidden = path.name.startswith(".")
            if path.is_file() and not hidden and not is_weights and path.name not in NOT_COPIED:
                yield path


NOT_COPIED = {"README.md", "acemerge.yaml", "acemerge_manifest.json", "training_args.bin", "adapter_config.json"}


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file of so many bytes at most, or an error that names the file."""
    try:
        content = parse_json(read_bounded(path, limit), path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check that it is there and that you may read it") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def open_checkpoint(path: Path, name: str) -> Checkpoint:
    """Open a Hugging Face folder or a single weights file; reads headers only."""
    files = _weight_files(path)
    if path.is_dir():
        check_inside(path, [*files, *path.glob("*.index.json")])
    parts = [open_file(file) for file in files]
    tensors: dict[str, TensorHeader] = {}
    owner: dict[str, WeightsFile] = {}
    for part in parts:
        for tensor, header in part.tensors.items():
            if tensor in owner:
                raise InputError(f"{path}: tensor '{tensor}' is in both {owner[tensor].path.name} and {part.path.name}")
            tensors[tensor], owner[tensor] = header, part
    if not tensors:
        raise InputError(f"{path}: holds no tensors")
    _check_index(path, owner)
    tied = {copy: original for part in parts for copy, original in part.tied.items()}
    stamps = tuple(part.stamp for part in parts)
    model = Checkpoint(
        name, tensors, lambda tensor: owner[tensor].read_unchanged(tensor), path, tuple(files), tied, stamps=stamps
    )
    check_inside(path, model.side_files())
    return model


def from_state_dict(state_dict: Mapping[str, Tensor], name: str) -> Checkpoint:
    """An in-memory checkpoint. Its tensors' memory is handed out as it is: readers do not write to it."""
    if not isinstance(state_dict, Mapping):
        raise InputError(f"{name}: a {type(state_dict).__name__} is no state dict; give model.state_dict()")
    tensors = {key: _in_memory(name, key, tensor) for key, tensor in state_dict.items()}
    headers = {key: _header_of(tensor) for key, tensor in tensors.items()}
    return Checkpoint(name, headers, tensors.__getitem__, tied=_shared_storage(tensors))


def _in_memory(model: str, name: str, tensor: object) -> Tensor:
    """A tensor of a state dict, without what torch watches for gradients."""
    import torch

    kind = type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{model}: '{name}' is a {kind}, not a tensor; give model.state_dict()")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise InputError(f"{model}: '{name}' is not a plain dense tensor with data ({kind}, {tensor.layout}, {tensor.device})")
    return tensor.detach()


def _header_of(tensor: Tensor) -> TensorHeader:
    return TensorHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


# --- which files make up a model ---------------------------------------------------------------------------------------


def _weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights, or an error that says what was found instead."""
    if path.is_file():
        if not path.name.endswith(WEIGHT_SUFFIXES):
            raise InputError(f"{path}: not a weights file; expected a folder or one of {', '.join(WEIGHT_SUFFIXES)}")
        return [path]
    if (path / "adapter_config.json").is_file():
        raise InputError(f"{path}: a PEFT adapter, not a full model; give it as an expert, after the base it belongs to")
    for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = path / f"{stem}.{kind}.index.json"
        if index.is_file():
            return _indexed_shards(index)
        if (path / f"{stem}.{kind}").is_file():
            return [path / f"{stem}.{kind}"]
    return _unindexed_files(path)


def _indexed_shards(index: Path) -> list[Path]:
    shards = list(dict.fromkeys(_weight_map(index).values()))
    strange = [shard for shard in shards if Path(shard).name != shard or shard in ("", "..") or not shard.isprintable()]
    if strange:
        raise InputError(f"{index}: shard names must be plain file names beside the index, found {strange[0]!r}")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise PreflightError(f"{index.parent / shard}: missing, but named in {index.name}; download it" for shard in missing)
    return [index.parent / shard for shard in shards]


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: has no 'weight_map' of tensor names to shard files")
    return weight_map


def _unindexed_files(path: Path) -> list[Path]:
    """A folder with no standard name or index: a full set of numbered shards, or one single weights file."""
    if not path.is_dir():
        raise InputError(f"{path}: neither a folder nor an ordinary file")
    files = (p for p in path.iterdir() if p.is_file())  # not pipes or devices
    present = sorted(p for p in files if p.name.endswith(WEIGHT_SUFFIXES) and p.name != "training_args.bin")
    safetensors = [p for p in present if p.suffix == ".safetensors"]
    candidates = safetensors or present
    numbered = [(p, match) for p in candidates if (match := _SHARD.fullmatch(p.name))]
    if numbered and len(numbered) == len(candidates):
        count = int(numbered[0][1]["count"])
        found = {int(match["number"]) for _, match in numbered}
        if found != set(range(1, count + 1)):
            absent = sorted(set(range(1, count + 1)) - found)
            raise InputError(f"{path}: {len(found)} of {count} shards found; number {absent[0]} is missing; download it")
        return candidates
    if len(candidates) == 1:
        return candidates
    adapters = sorted(p.name for p in path.iterdir() if (p / "adapter_config.json").is_file())
    if adapters and not candidates:
        raise InputError(f"{path}: no weights here, but PEFT adapters below it; give {path / adapters[0]}")
    found_names = ", ".join(p.name for p in candidates) or "no weights at all"
    raise InputError(f"{path}: expected model.safetensors, pytorch_model.bin or an index of shards; found {found_names}")


def _check_index(path: Path, owner: Mapping[str, WeightsFile]) -> None:
    """Every tensor the index promises must be in the shard it names."""
    index = next((path / f"{stem}.index.json" for stem in ("model.safetensors", "pytorch_model.bin")
                  if path.is_dir() and (path / f"{stem}.index.json").is_file()), None)  # fmt: skip
    if index is None:
        return
    problems = [
        f"{index.parent / shard}: tensor '{tensor}' is missing, but named in {index.name}"
        for tensor, shard in _weight_map(index).items()
        if tensor not in owner or owner[tensor].path.name != shard
    ]
    if problems:
        raise PreflightError(problems)


# --- one file ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightsFile:
    """One file: its tensors' headers, and a way to read each lazily."""

    stamp: FileStamp
    tensors: Mapping[str, TensorHeader]
    read: Callable[[str], Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.stamp.path

    def __reduce__(self) -> tuple[Callable[[Path], WeightsFile], tuple[Path]]:
        """Another process opens the file itself: no tensor travels."""
        return open_file, (self.path,)

    def read_unchanged(self, tensor: str) -> Tensor:
        """One tensor, of a file that has not changed since it was opened."""
        self.stamp.check()
        return self.read(tensor)


def open_file(path: Path) -> WeightsFile:
    """Open one weights file, whatever its format; reads its header only."""
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read; you lack the permission")
    check_not_pointer(path)
    opened = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
    check_names(path, opened.tensors)
    return opened


def _open_safetensors(path: Path) -> WeightsFile:
    stamp = FileStamp.of(path)  # before it is opened, so that no later change is missed
    try:
        check_header_length(path)
        handle: Any = safe_open(path, framework="pt")  # its methods are untyped
        header = safetensors_header(path)
        # The library's own order leaves open which of several empty tensors comes first.
        names = sorted(header, key=lambda name: (header[name]["data_offsets"], name))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}). Download or save it again.") from None
    strange = next((name for name in names if header[name]["dtype"] not in _SAFETENSORS_DTYPES), None)
    if strange is not None:
        raise InputError(f"{path}: tensor '{strange}' has dtype {header[strange]['dtype']}, which acemerge cannot read")
    tensors = {name: TensorHeader(_SAFETENSORS_DTYPES[header[name]["dtype"]], tuple(header[name]["shape"])) for name in names}
    return WeightsFile(stamp, tensors, handle.get_tensor)


def _open_pickle(path: Path) -> WeightsFile:
    """A torch.save file, read without running code and, unless it is in torch's pre-1.6 format, memory-mapped."""
    stamp = FileStamp.of(path)
    check_zip(path)
    state_dict = _unwrap(_load_weights_only(path), path)
    for name, tensor in state_dict.items():
        check_plain(path, name, tensor)
    headers = {name: _header_of(tensor) for name, tensor in state_dict.items()}
    strange = next((name for name, header in headers.items() if header.dtype not in SAFETENSORS_NAME), None)
    if strange is not None:
        raise InputError(f"{path}: tensor '{strange}' has dtype {headers[strange].dtype}, which acemerge cannot read")
    return WeightsFile(stamp, headers, state_dict.__getitem__, _shared_storage(state_dict))


def _load_weights_only(path: Path) -> Any:
    import torch

    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling untrusted bytes can fail in any way
        raise InputError(
            f"{path}: cannot be loaded safely because it is damaged or holds more than plain tensors "
            f"({type(error).__name__}). If you trust the file, convert it where its code is installed: "
            "safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        ) from None


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside a training checkpoint: {'state_dict': ...}, {'model': ...}, some levels deep."""
    import torch

    for _ in range(_DEEPEST_WRAPPING):  # a pickle can hold itself
        if not isinstance(content, Mapping):
            break
        wrapper = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if wrapper is None:
            # Parameters are tensors that torch watches, and what is read here is written to pieces that it does not.
            tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, torch.Tensor)}
            if tensors:
                return tensors
            break
        content = content[wrapper]
    raise InputError(f"{path}: holds no state dict of tensors (found {type(content).__name__}); save model.state_dict()")


def _shared_storage(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
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
