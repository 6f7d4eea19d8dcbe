"""Whether an output folder is still what its manifest says: every file, every tensor, every account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acemerge.checkpoints.content_hash import has_hash
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.checkpoints.formats.registry import weight_suffixes
from acemerge.errors import InputError
from acemerge.output.manifest import MANIFEST, Manifest, TensorRecord, files_below, read_manifest
from acemerge.output.writer import tensor_hash
from acemerge.planning.shares import ACTIONS


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
    manifest = read_manifest(folder)
    present = {name for name in files_below(folder) if name != MANIFEST}
    foreign = sorted(present - manifest.files.keys())
    changes_model = [name for name in foreign if name.endswith((*weight_suffixes(), ".index.json"))]
    problems = [f"{name}: not from acemerge, and a loader may take it for the model's weights" for name in changes_model]
    problems += _check_files(folder, manifest.files)
    tensors = manifest.tensors if isinstance(manifest, Manifest) else []
    if isinstance(manifest, Manifest):
        problems += _check_tensors(folder, manifest)
    harmless = [name for name in foreign if name not in changes_model]
    return Verification(folder, len(manifest.files), len(tensors), problems, harmless)


def _check_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    whole = folder.resolve()
    for name, expected in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(whole):
            yield f"{name}: named in {MANIFEST}, but outside the folder"
        elif not path.is_file():
            yield f"{name}: missing"
        elif not has_hash(path, expected):
            yield f"{name}: its content has changed"


def _check_tensors(folder: Path, manifest: Manifest) -> Iterator[str]:
    """That the weights load, are exactly those accounted for, and that the accounts add up."""
    if sum(manifest.totals.get(action, 0) for action in ACTIONS) != len(manifest.tensors):
        yield f"{MANIFEST}: {' + '.join(ACTIONS)} is not the number of tensors"
    if manifest.saved_as == "adapter":
        return
    try:
        model = open_checkpoint(folder, folder.name, as_stored=True)
    except InputError as error:
        yield from error.found
        return
    recorded = {name for tensor in manifest.tensors for name in (tensor.name, tensor.scales) if name}
    for name in sorted(model.tensors.keys() ^ recorded):
        yield f"tensor '{name}': in {'the weights' if name in model.tensors else MANIFEST} only"
    for tensor in manifest.tensors:
        if tensor.name in model.tensors and (problem := _compare(model, tensor)):
            yield f"tensor '{tensor.name}' in {tensor.shard}: {problem}"


def _compare(model: Checkpoint, tensor: TensorRecord) -> str | None:
    header = model.tensors[tensor.name]
    if (header.dtype, list(header.shape)) != (tensor.output_dtype, tensor.shape):
        return f"is {header.dtype} {list(header.shape)}, the merge wrote {tensor.output_dtype} {tensor.shape}"
    return None if tensor_hash(model.read(tensor.name)) == tensor.hash else "its values have changed"
