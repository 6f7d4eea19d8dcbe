"""acemerge_manifest.json, a folder's account of itself: what it says, and the one place where it is made, written and read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from acemerge.checkpoints.content_hash import ContentHash, file_hash
from acemerge.checkpoints.folder import read_json
from acemerge.errors import InputError, no_folder
from acemerge.layer_names import kind_of
from acemerge.output.adapter_writer import overall_error
from acemerge.output.input_hashes import Hashes
from acemerge.output.kept_change import shares_of_change
from acemerge.planning.plan import Plan
from acemerge.planning.shares import weights_by_fate
from acemerge.version import __version__, versions

MANIFEST = "acemerge_manifest.json"
_LARGEST = 200_000_000  # bytes: about 1 kB for each tensor, and the largest models have 100,000
_OUTCOME = ("warnings", "written", "hash")  # after the plan's fields and the facts, in a file


# --- what it says ------------------------------------------------------------------------------------------------------


class _Account(BaseModel):
    """A part of the file. What was never set is not written."""

    def to_json(self) -> dict[str, Any]:
        """As the file holds it."""
        return self.model_dump(exclude_unset=True)


class TensorRecord(_Account):
    """What was planned for one tensor, and what became of it."""

    model_config = ConfigDict(extra="allow")

    name: str
    shape: list[int]
    dtype: str
    output_dtype: str
    action: str
    reason: str
    shard: str
    rows: str | None = None
    """Of a tensor with a row for every token, what became of them, if they did not stay where they were."""
    scales: str | None = None
    """Of a tensor in 8 bits: the name of the one that holds its scales."""
    method: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    orientation: str | None = None
    experts: dict[str, str | None] = Field(default_factory=dict)
    """Expert -> its name of the tensor; None: an adapter that leaves it as it is."""
    route: str | None = None
    """How adapters were merged."""
    warnings: list[str] = Field(default_factory=list)
    written: str | None = None
    """In an adapter: in which form."""
    hash: ContentHash | None = None
    """None in an adapter, whose tensors are factors of the change: there the file's hash must do."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Whatever else the method told of it. A file holds them among the other fields, and anybody may have written it."""
        return self.model_extra or {}

    def told(self, fact: str) -> Any:
        """A fact of any kind, as it can be shown; None if there is none of that name."""
        value = self.facts.get(fact)
        return None if type(value) is int and not _is_number(value) else value

    def number(self, fact: str) -> float | None:
        """A fact that is a number; None if there is none of that name."""
        value = self.facts.get(fact)
        return value if _is_number(value) else None

    def numbers(self, fact: str) -> list[float]:
        """A fact that is a list of numbers; empty if there is none of that name."""
        values = self.facts.get(fact)
        return values if isinstance(values, list) and all(map(_is_number, values)) else []

    def text(self, fact: str) -> str | None:
        """A fact that is a word; None if there is none of that name."""
        value = self.facts.get(fact)
        return value if isinstance(value, str) else None

    @property
    def kind(self) -> str:
        """Of layer."""
        return kind_of(self.name, len(self.shape))

    @model_serializer(mode="wrap")
    def _in_order(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The plan's fields, the facts, the outcome."""
        fields: dict[str, Any] = dump(self)
        outcome = {name: fields.pop(name) for name in _OUTCOME if name in fields}
        return fields | outcome


def _is_number(value: object) -> bool:
    """Such as a float can hold: JSON has whole numbers without end."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


class ShardRecord(_Account):
    """What is noted of a finished shard: its hash, its parts' and what became of each of its tensors."""

    hash: str
    parts: dict[str, str]
    tensors: list[TensorRecord]


class Manifest(_Account):
    """Of a merge."""

    acemerge: str
    versions: dict[str, str] = Field(default_factory=dict)
    """Of what it was made with."""
    base: str
    experts: list[str]
    family: str
    method: str
    options: dict[str, Any]
    orientation: str
    saved_as: str = "model"
    per_task: bool = False
    uses: str = "weights"
    data: dict[str, Any] | None = None
    vocabulary: dict[str, Any] | None = None
    """Whose tokens the output has, where models differ in theirs or something was asked for."""
    totals: dict[str, int | float] = Field(default_factory=dict)
    tensors: list[TensorRecord]
    omitted: dict[str, str] = Field(default_factory=dict)
    heads: dict[str, list[str]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    cautions: list[str] = Field(default_factory=list)
    """What the finished merge itself gives reason to say."""
    relative_error: float | None = None
    """Of an adapter: over all tensors that were written as factors."""
    energy: dict[str, float] = Field(default_factory=dict)
    """Of an adapter: how much of the merged change is in factors, saved whole, cut off by the rank and left out."""
    unused: dict[str, list[str]] = Field(default_factory=dict)
    inputs: dict[str, dict[str, str]] = Field(default_factory=dict)
    outputs: dict[str, str] = Field(default_factory=dict)
    parts: dict[str, str] = Field(default_factory=dict)
    stages: dict[str, Any] = Field(default_factory=dict)
    """Model -> the recipe and the manifest's facts of the merge that made it, where that was a stage of this one."""
    files: dict[str, ContentHash]
    """Every other file of the folder."""

    @property
    def weights(self) -> dict[str, int]:
        """How many numbers have which fate."""
        return weights_by_fate((tensor.action, math.prod(tensor.shape)) for tensor in self.tensors)

    @property
    def merged(self) -> list[TensorRecord]:
        """What the method merged."""
        return [tensor for tensor in self.tensors if tensor.action == "merged"]


class ExportManifest(_Account):
    """Of one task's model, made from a merge by `acemerge task`."""

    exported: str
    files: dict[str, ContentHash]


class _Listing(BaseModel):
    """What the two have in common."""

    files: dict[str, Any]


# --- making and writing it ---------------------------------------------------------------------------------------------


def manifest_of(plan: Plan, shards: Mapping[str, ShardRecord], hashes: Hashes, stages: Mapping[str, Any]) -> Manifest:
    """The account of a merge, when all shards are finished; `write_manifest` adds the files."""
    finished = {shard: shards[shard] for shard in plan.shards}
    tensors = [tensor for record in finished.values() for tensor in record.tensors]
    lost = _held_by_adapter(tensors) if plan.recipe.save_as == "adapter" else {}
    return Manifest.model_validate(
        {
            "acemerge": __version__,
            "versions": versions(),
            **plan.to_json(),
            **lost,
            "tensors": tensors,
            "cautions": plan.cautions,
            "unused": _unused_tensors(plan),
            "inputs": {model: dict(files) for model, files in hashes.items()},
            "outputs": {shard: record.hash for shard, record in finished.items()},
            "parts": {path: told for record in finished.values() for path, told in record.parts.items()},
            **({"stages": dict(stages)} if stages else {}),
            "files": {},
        }
    )


def _held_by_adapter(tensors: Sequence[TensorRecord]) -> dict[str, Any]:
    told = [tensor.to_json() for tensor in tensors]
    return {"relative_error": overall_error(told), "energy": shares_of_change(told)}


def _unused_tensors(plan: Plan) -> dict[str, list[str]]:
    """Each expert's tensors that are neither merged, averaged nor its head: the base's are kept or copied, or they are tied."""
    used = {(source.expert, source.name) for tensor in plan.tensors for source in tensor.experts}
    used |= {(head.expert, name) for head in plan.heads for name in head.tensors}
    return {
        expert.name: [name for name in expert.tensors if (index, name) not in used] for index, expert in enumerate(plan.experts)
    }


def write_manifest(folder: Path, manifest: Manifest | ExportManifest, known: Mapping[str, str]) -> None:
    """Write the folder's own account, last: every other file with its hash, which --overwrite and `verify` go by.

    `known` are the hashes of files that were hashed as they were written.
    """
    files = {name: known.get(name) or file_hash(folder / name) for name in files_below(folder)}
    content = {**manifest.to_json(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def files_below(folder: Path) -> list[str]:
    """Every file of a folder but acemerge's working ones, by its path within it."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(path for path in paths if not path.startswith(".acemerge-"))


# --- reading it --------------------------------------------------------------------------------------------------------

MERGE_AGAIN = "merge again"
_Kind = TypeVar("_Kind", bound=BaseModel)


def read_manifest(folder: Path, *, cure: str = MERGE_AGAIN) -> Manifest | ExportManifest:
    """What a folder says of itself; `cure` is what to do about one that cannot be read."""
    content = _content(folder, "acemerge")
    if "exported" in content:
        return _checked(ExportManifest, content, folder, cure)
    return _checked(Manifest, content, folder, cure)


def read_merge(folder: Path) -> Manifest:
    """The same of a folder that must be a merge."""
    content = _content(folder, "`acemerge merge`")
    if "exported" in content:
        raise InputError(f"{folder}: is one task's model, made by `acemerge task`; give the merged folder it came from")
    return _checked(Manifest, content, folder, MERGE_AGAIN)


def own_files(folder: Path) -> set[str]:
    """The files that acemerge wrote there, whatever else the manifest says, which may be of another version."""
    return {*_checked(_Listing, _content(folder, "acemerge"), folder, MERGE_AGAIN).files, MANIFEST}


def is_export(folder: Path) -> bool:
    """Whether an output is one task's model, and not a merge."""
    return "exported" in _content(folder, "acemerge")


def _content(folder: Path, writer: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(no_folder(folder))
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{folder}: has no {MANIFEST}, so it is not an output of {writer}")
    return read_json(folder / MANIFEST, _LARGEST)


def _checked(kind: type[_Kind], content: Mapping[str, Any], folder: Path, cure: str) -> _Kind:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{folder / MANIFEST}: damaged, or of another version ({where}: {first['msg']}); {cure}") from None
