"""The index that `acemerge route` writes: adapters and their centroids in one file, with the hash of everything it points to.

A safetensors file: the centroids, and in its metadata the rest as JSON. Places of models are told from the index's own folder, so
that an index and its adapters can be moved together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from acemerge.adapters.adapter import Adapter, is_adapter, open_adapter
from acemerge.adapters.settings import CONFIG
from acemerge.checkpoints.content_hash import ContentHash, file_hash, has_hash, name_in_hub_cache
from acemerge.checkpoints.families import choose_family, is_task_head
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint, read_json
from acemerge.checkpoints.formats.registry import open_file
from acemerge.checkpoints.source import Source, expand_home, resolve_source
from acemerge.checkpoints.untrusted import is_file_name
from acemerge.errors import InputError, PreflightError, did_you_mean, disk_failed, first_line
from acemerge.output.whole_files import check_writable, replace_file
from acemerge.routing.weights import direction
from acemerge.version import __version__

_RECORD = "acemerge_route"


class Kernel(BaseModel):
    """How a query's weights are found (`routing.weights.sparse_weights`). Defaults are the authors'."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """Its width: the smaller, the fewer adapters count."""
    tau: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Adapters with no larger share of the weights are left out."""
    top: Annotated[int, Field(ge=1)] = 50
    """Adapters that are merged for a query, at most."""


def _beside(name: str) -> str:
    if not is_file_name(name):
        raise ValueError("not the name of a file in the model's folder")
    return name


class Place(BaseModel):
    """A model or adapter that the index points to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: str
    """From the folder that the index is in, or the hub's id."""
    files: dict[Annotated[str, AfterValidator(_beside)], ContentHash]
    left_out: list[str] = []
    """Tensors of an adapter that are its own and no change of the base's: the heads of its task."""

    def check(self, source: Source) -> None:
        """Refuse what is not what was indexed."""
        for name, told in self.files.items():
            file = _root(source) / name
            if not file.is_file():
                raise InputError(f"{file}: was indexed, and is not there any more; run `acemerge route` again")
            if name_in_hub_cache(file) != told and not has_hash(file, told):
                raise InputError(f"{file}: has changed since it was indexed; run `acemerge route` again")


class Record(BaseModel):
    """What an index says beside the centroids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acemerge: str
    base: Place
    adapters: dict[str, Place]
    kernel: Kernel


@dataclass(frozen=True)
class Index:
    """An index as it was read."""

    file: Path
    record: Record
    centroids: Float[Tensor, "adapter size"]
    """In the order of the record's adapters."""

    def find(self, place: Place, offline: bool = False) -> Source:
        """Where a model of the record is on this machine; refused, if it is not the one that was indexed."""
        source = resolve_source(place.where, relative_to=self.file.parent, offline=offline)
        place.check(source)
        return source


@dataclass(frozen=True)
class Opened:
    """A base and its adapters, by headers."""

    base: Checkpoint
    adapters: Mapping[str, Adapter]


def write_index(
    adapters: Sequence[str], centroids: Path, output: Path, *, base: str | None = None, kernel: Kernel | None = None,
    offline: bool = False,
) -> Record:  # fmt: skip
    """Check everything, then write the index: it is there whole, or not at all."""
    output = expand_home(output)
    check_writable(output.parent, str(output))
    if output.is_dir():
        raise InputError(f"{output}: is a folder; give the name of a file")
    if len(adapters) < 2:
        raise InputError(f"{len(adapters)} adapter: there is nothing to choose among; give at least two")
    sources = _named([resolve_source(given, offline=offline) for given in adapters])
    source = resolve_source(base or _base_of(sources.values()), offline=offline)
    opened = open_models(source, sources)
    vectors = read_centroids(expand_home(centroids), list(sources))
    record = Record(
        acemerge=__version__,
        base=_place(source, opened.base, output),
        adapters={name: _place(sources[name], adapter, output) for name, adapter in opened.adapters.items()},
        kernel=kernel or Kernel(),
    )
    metadata = {_RECORD: record.model_dump_json()}
    with replace_file(output) as staged:
        staged.write_bytes(save({"centroids": vectors.float().contiguous()}, metadata=metadata))
    return record


def read_index(file: Path) -> Index:
    """An index, as far as it can be checked without its models."""
    file = expand_home(file)
    if not file.is_file():
        raise InputError(f"{file}: no such file; `acemerge route` writes an index")
    try:
        with safe_open(file, framework="pt") as opened:
            record = Record.model_validate_json((opened.metadata() or {}).get(_RECORD, ""))
            centroids = opened.get_tensor("centroids")
    except RuntimeError as error:  # torch's, of all that the system may refuse
        if not disk_failed(error):
            raise
        raise InputError(f"{file}: cannot be read ({first_line(error)}); the disk fails, copy the file elsewhere") from None
    except (SafetensorError, ValidationError, OSError) as error:
        raise InputError(f"{file}: is no index that `acemerge route` wrote ({first_line(error)}); write it again") from None
    if centroids.dim() != 2 or len(centroids) != len(record.adapters) or not torch.isfinite(centroids).all():
        raise InputError(f"{file}: its centroids are not one vector for each of {len(record.adapters)} adapters; write it again")
    return Index(file, record, centroids)


def open_models(base: Source, adapters: Mapping[str, Source]) -> Opened:
    """By headers; all problems at once."""
    model = open_checkpoint(base.path, base.short_name)
    family = choose_family("auto", model.config, model.tensors)
    problems: list[str] = []
    opened = {}
    for name, source in adapters.items():
        try:
            if not is_adapter(source.path):
                raise InputError(f"{source.given}: is no adapter; make one of a full fine-tune with `acemerge extract`")
            opened[name] = open_adapter(source.path, name, model, family)
            _check_changes(opened[name], model)
        except InputError as error:
            problems.extend(error.found)
    if problems:
        raise PreflightError(problems)
    return Opened(model, opened)


def left_out(adapter: Adapter) -> list[str]:
    """The adapter's own tensors that are no change of the base's: a head answers the question of its own task."""
    changes = adapter.changes or {}
    return [name for name in adapter.tensors if name not in changes and is_task_head(name)]


def _check_changes(adapter: Adapter, base: Checkpoint) -> None:
    """Every other tensor must be one of the base's."""
    for name in adapter.tensors.keys() - set(left_out(adapter)):
        own, ours = adapter.tensors[name], base.tensors.get(name)
        if ours is None or ours.shape != own.shape:
            has = f"[{', '.join(map(str, ours.shape))}]" if ours else "none of this name"
            raise InputError(
                f"adapter {adapter.where}: changes '{name}' {list(own.shape)}, base {base.where} has {has}; give the base that "
                "it was trained on, with --base"
            )


def _named(sources: Sequence[Source]) -> dict[str, Source]:
    named: dict[str, Source] = {}
    for source in sources:
        if (twice := named.get(source.short_name)) is not None:
            raise InputError(f"{twice.given} and {source.given}: are both called '{source.short_name}'; rename a folder")
        named[source.short_name] = source
    return named


def _base_of(adapters: Iterable[Source]) -> str:
    """What the adapters' settings name as their base, if they agree."""
    named: dict[str, str | None] = {}
    for source in adapters:
        file = source.path / CONFIG
        base = read_json(file).get("base_model_name_or_path") if file.is_file() else None
        named[source.given] = base if isinstance(base, str) and base else None
    if len(set(named.values())) == 1 and (base := next(iter(named.values()))):
        return base
    told = ", ".join(f"{given} {base or 'none'}" for given, base in named.items())
    raise InputError(f"the adapters do not name one base between them ({told}); give it with --base")


def _place(source: Source, model: Checkpoint, output: Path) -> Place:
    here = os.path.relpath(source.path.resolve(), output.resolve().parent)
    where = f"{source.hub_id}@{source.revision}" if source.hub_id else here
    files = {os.path.relpath(file, _root(source)): name_in_hub_cache(file) or file_hash(file) for file in model.files}
    return Place(where=where, files=files, left_out=left_out(model) if isinstance(model, Adapter) else [])


def _root(source: Source) -> Path:
    return source.path if source.path.is_dir() else source.path.parent


def read_centroids(file: Path, names: Sequence[str]) -> Float[Tensor, "adapter size"]:
    """A vector by each adapter's name, in these adapters' order, at length 1; all problems at once."""
    if not file.is_file():
        raise InputError(
            f"--centroids {file}: no such file; give a .safetensors file with a vector for each adapter, by its name"
        )
    opened = open_file(file)
    missing = [name for name in names if name not in opened.tensors]
    problems = [f"{file}: has no centroid for adapter '{name}'; {did_you_mean(name, list(opened.tensors))}" for name in missing]
    problems += [f"{file}: '{name}' is the name of no adapter that is given" for name in opened.tensors if name not in names]
    vectors = {name: opened.read(name).double() for name in names if name not in missing}
    sizes = {name: list(vector.shape) for name, vector in vectors.items()}
    if len({tuple(size) for size in sizes.values()}) > 1 or any(len(size) != 1 for size in sizes.values()):
        problems.append(f"{file}: centroids must be vectors of one size, found {', '.join(f'{n} {s}' for n, s in sizes.items())}")
    problems += [
        f"{file}: '{name}' is zero or not finite, so nothing is near it; give the mean of its rows' embeddings"
        for name, vector in vectors.items()
        if not torch.isfinite(vector).all() or not vector.any()
    ]
    if problems:
        raise PreflightError(problems)
    return direction(torch.stack(list(vectors.values())))
