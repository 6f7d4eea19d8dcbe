"""Whether an output folder is still what its manifest says: every file, every tensor, every account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from acemerge.checkpoints.folder import WEIGHT_SUFFIXES, Checkpoint, open_checkpoint, read_json
from acemerge.errors import InputError
from acemerge.output.input_hashes import content_sha256
from acemerge.output.writer import MANIFEST, files_below, tensor_sha256

_ACTIONS = ("merged", "averaged", "kept", "copied")
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _TensorRecord(BaseModel):
    name: str
    shape: list[int]
    output_dtype: str
    action: str
    shard: str
    sha256: Sha256 | None = None
    """None in an adapter, whose tensors are factors of the change: there the file's hash must do."""


class _Manifest(BaseModel):
    """What verification needs of a manifest; the folder of one task has files only."""

    files: dict[str, Sha256]
    tensors: list[_TensorRecord] = Field(default_factory=list)
    totals: dict[str, float] = Field(default_factory=dict)
    exported: str | None = None
    saved_as: str = "model"


@dataclass(frozen=True)
class Verification:
    """What was found."""

    folder: Path
    files: int
    tensors: int
    problems: Sequence[str]
    foreign: Sequence[str]
    """Files that acemerge did not write and that change nothing about the model."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "folder": str(self.folder),
            "whole": not self.problems,
            "files": self.files,
            "tensors": self.tensors,
            "problems": list(self.problems),
            "not_from_acemerge": list(self.foreign),
        }


def verify_output(folder: Path) -> Verification:
    """Read everything again and compare it with the manifest."""
    manifest = _read_manifest(folder)
    present = {name for name in files_below(folder) if name != MANIFEST}
    foreign = sorted(present - manifest.files.keys())
    changes_model = [name for name in foreign if name.endswith((*WEIGHT_SUFFIXES, ".index.json"))]
    problems = [f"{name}: not from acemerge, and a loader may take it for the model's weights" for name in changes_model]
    problems += _check_files(folder, manifest.files)
    if not manifest.exported:
        problems += _check_tensors(folder, manifest)
    harmless = [name for name in foreign if name not in changes_model]
    return Verification(folder, len(manifest.files), len(manifest.tensors), problems, harmless)


def _read_manifest(folder: Path) -> _Manifest:
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{folder}: has no {MANIFEST}, so it is not an output of acemerge")
    try:
        return _Manifest.model_validate(read_json(folder / MANIFEST))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{folder / MANIFEST}: damaged, or of another version ({where}: {first['msg']}); merge again") from None


def _check_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    for name, sha in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"{name}: named in {MANIFEST}, but outside the folder"
        elif not path.is_file():
            yield f"{name}: missing"
        elif content_sha256(path) != sha:
            yield f"{name}: its content has changed"


def _check_tensors(folder: Path, manifest: _Manifest) -> Iterator[str]:
    """That the weights load, are exactly those accounted for, and that the accounts add up."""
    if sum(manifest.totals.get(action, 0) for action in _ACTIONS) != len(manifest.tensors):
        yield f"{MANIFEST}: {' + '.join(_ACTIONS)} is not the number of tensors"
    if manifest.saved_as == "adapter":
        return
    try:
        model = open_checkpoint(folder, folder.name)
    except InputError as error:
        yield str(error)
        return
    recorded = {tensor.name for tensor in manifest.tensors}
    for name in sorted(model.tensors.keys() ^ recorded):
        yield f"tensor '{name}': in {'the weights' if name in model.tensors else MANIFEST} only"
    for tensor in manifest.tensors:
        if tensor.name in model.tensors and (problem := _compare(model, tensor)):
            yield f"tensor '{tensor.name}' in {tensor.shard}: {problem}"


def _compare(model: Checkpoint, tensor: _TensorRecord) -> str | None:
    header = model.tensors[tensor.name]
    if (header.dtype, list(header.shape)) != (tensor.output_dtype, tensor.shape):
        return f"is {header.dtype} {list(header.shape)}, the merge wrote {tensor.output_dtype} {tensor.shape}"
    return None if tensor_sha256(model.read(tensor.name)) == tensor.sha256 else "its values have changed"
