"""Checkpoints: what the headers say, and lazy reads of one tensor at a time.

Opening one reads headers only. Reading a tensor gives a view of the memory-mapped file: its pages belong to the page cache,
not to this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.change import Change
from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.file_vector import FileVector
from acemerge.checkpoints.formats.registry import WeightsFile, format_of, formats, open_file, weight_suffixes
from acemerge.checkpoints.quantised.eight_bits import StoredInEightBits
from acemerge.checkpoints.quantised.reading import QUANTIZATION, dequantised, in_eight_bits, reader
from acemerge.checkpoints.tensor_header import TensorHeader, header_of, shared_storage
from acemerge.checkpoints.untrusted import MAX_JSON_BYTES, check_inside, is_file_name, parse_json, read_bounded, shortened
from acemerge.errors import InputError, PreflightError

if TYPE_CHECKING:
    from torch import Tensor


_SHARD = re.compile(r".+-(?P<number>\d{5})-of-(?P<count>\d{5})")
_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx")
"""Of formats that acemerge does not read."""


@dataclass(frozen=True)
class _Files:
    """How tensors are read that are the files' own, not made of others."""

    owner: Mapping[str, WeightsFile]

    def __call__(self, name: str) -> Tensor:
        return self.owner[name].read_unchanged(name)

    def vector(self, name: str) -> FileVector | None:
        return self.owner[name].vector_unchanged(name)


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
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """What the output's config says otherwise than this model's file; None: nothing."""
    made_of: Callable[[str], Sequence[Tensor]] | None = None
    """Of a tensor whose floats are made when it is read: what the files hold of it."""

    eight_bits: StoredInEightBits | None = None
    """How its files hold matrices of 8-bit floats, if they do."""

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
        """The model's config.json with its changes, or nothing."""
        path = self.folder / "config.json" if self.folder else None
        stated = read_json(path) if path and path.is_file() else {}
        return with_changes(stated, self.config_changes)

    @cached_property
    def where(self) -> str:
        """How messages name it."""
        return f"'{self.name}' ({self.location})" if self.location else f"'{self.name}'"

    def stored(self, name: str) -> list[tuple[str, Tensor]]:
        """What the files hold for a tensor, by the names there: its value, or what its change is made of."""
        change = self.changes.get(name) if self.changes else None
        return [(key, change.read(key)) for key in change.stored_names] if change else [(name, self.read(name))]

    def vector(self, name: str) -> FileVector | Tensor:
        """A tensor's entries in a row, to be read a piece at a time."""
        vector = self.read.vector(name) if isinstance(self.read, _Files) else None
        return vector or self.read(name).reshape(-1)

    def mapped(self, name: str) -> Sequence[Tensor]:
        """The memory-mapped parts of the files that a tensor is read from."""
        if self.changes and name in self.changes:
            return [tensor for _, tensor in self.stored(name)]
        return self.made_of(name) if self.made_of and self.tensors[name].made else [self.read(name)]

    def side_files(self) -> Iterator[Path]:
        """Files beside the weights, at the folder's top level: config, tokenizer, preprocessor, chat template..."""
        if self.folder is None:
            return
        for path in sorted(self.folder.iterdir()):
            ends_so = path.name.endswith((*weight_suffixes(), *_OTHER_WEIGHTS, ".index.json"))
            is_weights = ends_so and path.name not in NO_WEIGHTS
            hidden = path.name.startswith(".")
            if path.is_file() and not hidden and not is_weights and path.name not in NOT_COPIED:
                yield path


NO_WEIGHTS = {"spk_dict.pt"}
"""Copied although they end as weights do: the voices of Qwen2.5-Omni, without which transformers does not load it."""
NOT_COPIED = {"README.md", "acemerge.yaml", "acemerge_manifest.json", "training_args.bin", "adapter_config.json"}


def with_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config that says otherwise; what a change is None of, it no longer says."""
    return {key: value for key, value in {**config, **changes}.items() if value is not None or key not in changes}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that a config names first; nothing where it names none."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file of so many bytes at most, or an error that names the file."""
    try:
        content = parse_json(read_bounded(path, limit), path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check that it is there and that you may read it") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def open_checkpoint(path: Path, name: str, *, as_stored: bool = False) -> Checkpoint:
    """Open a Hugging Face folder or a single weights file; reads headers only.

    A quantised model's tensors are the floats that they stand for, unless they are asked for as they are stored.
    """
    files = weight_files(path)
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
        name, tensors, _Files(owner), path, tuple(files), tied, stamps=stamps,
        made_of=lambda tensor: [owner[tensor].held_unchanged(tensor)],
    )  # fmt: skip
    if not model.config:
        model = replace(model, config_changes=parts[0].config())
    check_inside(path, model.side_files())
    return _with_latest(_as_floats(model) if model.config.get(QUANTIZATION) and not as_stored else model)


def _as_floats(model: Checkpoint) -> Checkpoint:
    """A quantised model as the float model that it stands for."""
    headers, made = dequantised(model.config, model.tensors, model.read, model.where)
    return replace(
        model,
        tensors=headers,
        read=reader(made, model.read, model.where),
        made_of=lambda name: [model.read(part) for part in made[name].parts],
        config_changes={**model.config_changes, QUANTIZATION: None},
        eight_bits=in_eight_bits(model.config, model.tensors, made),
    )


def _with_latest(model: Checkpoint) -> Checkpoint:
    """A model that keeps the latest tensor whose floats it made: a merge reads the same one several times in a row."""
    if not any(header.made for header in model.tensors.values()):
        return model
    latest: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if not model.tensors[name].made:
            return model.read(name)
        value = latest.get(name)
        if value is None:
            latest.clear()  # before the next is made: there is one at a time
            value = latest[name] = model.read(name)
        return value

    return replace(model, read=read)


def from_state_dict(state_dict: Mapping[str, Tensor], name: str) -> Checkpoint:
    """An in-memory checkpoint. Its tensors' memory is handed out as it is: readers do not write to it."""
    if not isinstance(state_dict, Mapping):
        raise InputError(f"{name}: a {type(state_dict).__name__} is no state dict; give model.state_dict()")
    tensors = {key: _in_memory(name, key, tensor) for key, tensor in state_dict.items()}
    headers = {key: header_of(tensor) for key, tensor in tensors.items()}
    return Checkpoint(name, headers, tensors.__getitem__, tied=shared_storage(tensors))


def _in_memory(model: str, name: str, tensor: object) -> Tensor:
    """A tensor of a state dict, without what torch watches for gradients."""
    import torch

    kind = type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{model}: '{name}' is a {kind}, not a tensor; give model.state_dict()")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise InputError(f"{model}: '{name}' is not a plain dense tensor with data ({kind}, {tensor.layout}, {tensor.device})")
    return tensor.detach()


# --- which files make up a model ---------------------------------------------------------------------------------------


def weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights, or an error that says what was found instead."""
    if path.is_file():
        if not path.name.endswith(weight_suffixes()):
            raise InputError(f"{path}: not a weights file; expected a folder or one of {', '.join(weight_suffixes())}")
        return format_of(path).parts(path)
    if (path / "adapter_config.json").is_file():
        raise InputError(f"{path}: a PEFT adapter, not a full model; give it as an expert, after the base it belongs to")
    for each in formats():
        index = path / f"{each.model_file}.index.json"
        if index.is_file():
            return _indexed_shards(index)
        if (path / each.model_file).is_file():
            return [path / each.model_file]
    return _unindexed_files(path)


def _indexed_shards(index: Path) -> list[Path]:
    shards = list(dict.fromkeys(_weight_map(index).values()))
    strange = [shard for shard in shards if not is_file_name(shard)]
    if strange:
        raise InputError(f"{index}: shard names must be plain file names beside the index, found {shortened(repr(strange[0]))}")
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
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name != "training_args.bin")  # not pipes or devices
    candidates = next((own for each in formats() if (own := list(filter(each.matches, files)))), [])
    of_shards = {each.suffixes[0] for each in formats()}
    numbered = [match for p in candidates if p.suffix in of_shards and (match := _SHARD.fullmatch(p.stem))]
    if numbered and len(numbered) == len(candidates):
        count = int(numbered[0]["count"])
        found = {int(match["number"]) for match in numbered}
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
    expected = ", ".join(each.model_file for each in formats())
    raise InputError(f"{path}: expected {expected} or an index of shards; found {found_names}")


def _check_index(path: Path, owner: Mapping[str, WeightsFile]) -> None:
    """Every tensor the index promises must be in the shard it names."""
    index = next((file for each in formats() if (file := path / f"{each.model_file}.index.json").is_file()), None)
    if index is None:
        return
    problems = [
        f"{index.parent / shard}: tensor '{tensor}' is missing, but named in {index.name}"
        for tensor, shard in _weight_map(index).items()
        if tensor not in owner or owner[tensor].path.name != shard
    ]
    if problems:
        raise PreflightError(problems)
