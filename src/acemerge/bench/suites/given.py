"""Base and experts that others trained: on the hub, or in local folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from acemerge.bench.data.task import Task
from acemerge.checkpoints.content_hash import named_sha256
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.formats.registry import weight_suffixes
from acemerge.checkpoints.source import Source, expand_home, resolve_source
from acemerge.errors import InputError, no_folder


@dataclass(frozen=True)
class GivenExperts:
    """See `ExpertFolders`."""

    base_source: Source
    find: Mapping[str, Callable[[], Source]]
    """By expert. They are looked for, and fetched, when they are first asked for: a model that is there needs none of them."""

    @cached_property
    def sources(self) -> dict[str, Source]:
        """By expert."""
        return {expert: find() for expert, find in self.find.items()}

    @property
    def base(self) -> Path:
        """A folder, or a file of weights."""
        return self.base_source.path

    def folder(self, task: Task) -> Path:
        """Of the expert that knows the task."""
        return self.sources[task.expert].path

    @cached_property
    def hashes(self) -> dict[str, dict[str, Any]]:
        """Of every model: its public name, and the sha256 of its files of weights."""
        models = {"base": self.base_source, **self.sources}
        return {name: {"model": source.public_name, "sha256": _hashes(source.path)} for name, source in models.items()}

    def identity(self, tasks: Sequence[Task]) -> Any:
        """The hashes of these tasks' models, and where the tasks' data come from."""
        wanted = {"base", *(task.expert for task in tasks)}
        models = {name: found for name, found in self.hashes.items() if name in wanted}
        return {"models": models, "data": {task.name: [task.source, task.metric] for task in tasks}}


def _hashes(path: Path) -> dict[str, str]:
    return {file.name: named_sha256(file) for file in open_checkpoint(path, path.name).files}


def find_model(models: Path | None, places: Sequence[str], hub_id: str) -> Source:
    """The first of these places in the folder of models that holds weights; without such a folder, the hub's model."""
    if models is None:
        return resolve_source(hub_id)
    models = expand_home(models)
    if not models.is_dir():
        raise InputError(f"--models {no_folder(models)}")
    for place in places:
        path = models / place
        if path.is_file() or (path.is_dir() and any(file.name.endswith(weight_suffixes()) for file in path.iterdir())):
            return Source(str(path), path)
    raise InputError(
        f"--models {models}: has no {' or '.join(places)} with weights in it; put {hub_id} of the hub, or your own model, there"
    )


def task_folder(data: Path | None, task: str) -> Path | None:
    """Where the folder of data has a task's."""
    if data is None:
        return None
    folder = expand_home(data) / task
    if not folder.is_dir():
        raise InputError(f"--data {data}: has no folder {task}; put the task's files there, or leave --data out to use the hub's")
    return folder
