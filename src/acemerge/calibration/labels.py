"""The labels of an expert's rows: a class for each row, by number or by its name in the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acemerge.adapters.adapter import Adapter
from acemerge.calibration.models import model_config
from acemerge.calibration.texts import read_lines
from acemerge.checkpoints.families import is_task_head
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.formats.registry import open_file
from acemerge.errors import InputError, did_you_mean


def read_labels(file: Path, expert: Checkpoint, base: Checkpoint) -> Tensor | None:
    """[row]; None if no row has one."""
    names, count = _classes(expert, base)
    labels = _of_tensors(file) if file.suffix == ".safetensors" else _of_texts(file, names)
    if labels is not None and int(labels.max()) >= count:
        raise InputError(f"{file}: has label {int(labels.max())}, but expert {expert.where} has {count} classes, numbered from 0")
    return labels


def _classes(expert: Checkpoint, base: Checkpoint) -> tuple[Mapping[str, int], int]:
    """Their numbers by name, and how many there are. An adapter has no config; its head tells."""
    if isinstance(expert, Adapter) and any(is_task_head(name) for name in expert.tensors):
        names: Mapping[str, int] = expert.head_config({}, expert.tensors)["label2id"]
        return names, len(names)
    config = model_config(expert if expert.config else base)
    return config.label2id or {}, config.num_labels


def _of_tensors(file: Path) -> Tensor | None:
    opened = open_file(file)
    if "labels" not in opened.tensors:
        return None
    labels = opened.read_unchanged("labels")
    if labels.dim() != 1 or labels.is_floating_point() or not len(labels) or int(labels.min()) < 0:
        raise InputError(
            f"{file}: 'labels' must hold a class for each row, whole numbers [row] from 0, found {labels.dtype} "
            f"{list(labels.shape)}"
        )
    return labels.long()


def _of_texts(file: Path, classes: Mapping[str, int]) -> Tensor | None:
    rows = read_lines(file)
    labelled = ["label" in row for row in rows]
    if not any(labelled):
        return None
    if not all(labelled):
        raise InputError(f"{file}: row {labelled.index(False) + 1} has no 'label', others have one; give it on every line")
    return torch.tensor([_class_of(row["label"], classes, f"{file}, row {number}") for number, row in enumerate(rows, 1)])


def _class_of(label: Any, classes: Mapping[str, int], where: str) -> int:
    if isinstance(label, str):
        if label not in classes:
            raise InputError(f"{where}: the expert has no class '{label}': {did_you_mean(label, classes)}")
        return int(classes[label])
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        raise InputError(f"{where}: 'label' must be a class's name, or its number from 0, found {label!r}")
    return label
