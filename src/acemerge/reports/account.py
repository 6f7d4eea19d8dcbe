"""What a merge wrote about itself: the manifest beside its output, as far as a report needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from acemerge.checkpoints.folder import read_json
from acemerge.errors import InputError
from acemerge.output.writer import MANIFEST
from acemerge.planning.layer_names import kind_of


class TensorAccount(BaseModel):
    """One tensor of a manifest; what only some methods tell may be missing, or be there besides."""

    model_config = ConfigDict(extra="allow")

    name: str
    shape: list[int]
    action: str
    reason: str
    shard: str
    method: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    experts: dict[str, str | None] = Field(default_factory=dict)
    route: str | None = None
    warnings: list[str] = Field(default_factory=list)
    gamma: float | None = None
    branch: str | None = None
    ridge_share: float | None = None
    norm: float | None = None
    norm_ratio: float | None = None
    task_norms: list[float] = Field(default_factory=list)
    active_experts: int | None = None
    rank: int | None = None
    relative_error: float | None = None

    @property
    def kind(self) -> str:
        """Of layer."""
        return kind_of(self.name, len(self.shape))


class MergeAccount(BaseModel):
    """A manifest, as far as a report needs it."""

    acemerge: str
    base: str
    experts: list[str]
    family: str
    method: str
    options: dict[str, Any]
    orientation: str
    saved_as: str = "model"
    per_task: bool = False
    tensors: list[TensorAccount]
    omitted: dict[str, str] = Field(default_factory=dict)
    heads: dict[str, list[str]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    unused: dict[str, list[str]] = Field(default_factory=dict)
    relative_error: float | None = None

    @property
    def merged(self) -> list[TensorAccount]:
        """What the method merged."""
        return [tensor for tensor in self.tensors if tensor.action == "merged"]


def read_account(folder: Path) -> MergeAccount:
    """The manifest of an output folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{folder}: has no {MANIFEST}, so it is not an output of `acemerge merge`")
    return parse_account(read_json(folder / MANIFEST), folder / MANIFEST)


def parse_account(content: Mapping[str, Any], path: Path) -> MergeAccount:
    """A manifest's content, checked."""
    if "exported" in content:
        raise InputError(f"{path.parent}: is one task's model, made by `acemerge task`; give the merged folder it came from")
    try:
        return MergeAccount.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: damaged, or of another version ({where}: {first['msg']}); merge again") from None
