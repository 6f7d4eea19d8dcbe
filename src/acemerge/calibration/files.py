"""Data from files: one per expert, ready inputs (`<expert>.safetensors`) or texts (`<expert>.jsonl`), checked before any work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.calibration.inputs import Batch, Inputs, Prepared
from acemerge.calibration.models import load_model, model_class, model_config, outline_model
from acemerge.calibration.texts import read_texts
from acemerge.checkpoints.content_hash import file_hash
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.formats.registry import open_file
from acemerge.errors import InputError, PreflightError, did_you_mean

A_FILE_EACH = "a file per expert, <expert>.jsonl or <expert>.safetensors"
SUFFIXES = (".safetensors", ".jsonl")


@dataclass(frozen=True)
class ReadyInputs:
    """Tensors with a row each, as a model takes them."""

    tensors: Mapping[str, Tensor]
    lengths: Tensor

    def batch(self, indices: Tensor) -> Batch:
        """These rows."""
        return {name: tensor[indices] for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class FileData:
    """A folder with a file for each expert."""

    folder: Path
    prepared: Mapping[str, Prepared]
    hashes: Mapping[str, str]
    """Hash of every file, by its name."""

    @property
    def about(self) -> str:
        """The folder by its own name."""
        return f"files of {self.folder.resolve().name}"

    @property
    def record(self) -> dict[str, Any]:
        """With the files' hashes."""
        return {"about": self.about, "files": dict(self.hashes)}

    @property
    def reader(self) -> str:
        """Transformers."""
        return "transformers"

    @staticmethod
    def open(folder: Path, base: Checkpoint, experts: Sequence[Checkpoint]) -> FileData:
        """Read and check every expert's file; all problems at once."""
        problems: list[str] = []
        prepared, hashes = {}, {}
        for expert in experts:
            try:
                file = file_of(folder, expert)
                prepared[expert.name] = prepare_rows(file, base, expert)
                hashes[file.name] = file_hash(file)
            except InputError as error:
                problems.extend(error.found)
        if problems:
            raise PreflightError(problems)
        return FileData(folder, prepared, hashes)

    def inputs(self, expert: Checkpoint, rows: int) -> Inputs:
        """The file's first rows."""
        return Inputs(_First(self.prepared[expert.name], rows))

    def outline(self, expert: Checkpoint) -> nn.Module:
        """From the config alone."""
        return outline_model(expert)

    def load(self, expert: Checkpoint) -> nn.Module:
        """By transformers."""
        return load_model(expert)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """As transformers' models are called."""
        return model(**batch)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the model's head says."""
        logits: Tensor | None = getattr(model(**batch), "logits", None)
        if logits is None:
            raise InputError(
                f"{type(model).__name__} has no head and gives no logits, which this method needs; give experts with their task "
                "heads, or use regmean, which needs none"
            )
        return logits


@dataclass(frozen=True)
class _First:
    """The first rows of more."""

    all: Prepared
    count: int

    @property
    def lengths(self) -> Tensor:
        return self.all.lengths[: self.count]

    def batch(self, indices: Tensor) -> Batch:
        return self.all.batch(indices)


def file_of(folder: Path, expert: Checkpoint) -> Path:
    """The one file that holds an expert's rows."""
    found = [folder / f"{expert.name}{suffix}" for suffix in SUFFIXES if (folder / f"{expert.name}{suffix}").is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{folder}: has both {found[0].name} and {found[1].name}; keep the one to use")
    present = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
    raise InputError(
        f"{folder}: no data for expert {expert.where}: expected {expert.name}.jsonl or {expert.name}.safetensors, found "
        f"{', '.join(present[:5]) or 'neither kind of file'}"
    )


def prepare_rows(file: Path, base: Checkpoint, expert: Checkpoint) -> Prepared:
    """Its rows as the expert's model takes them; labels may be there and are left out."""
    prepared = read_texts(file, base, expert) if file.suffix == ".jsonl" else _read_ready(file, expert)
    _check_vocabulary(file, prepared, expert)
    return prepared


def _read_ready(file: Path, expert: Checkpoint) -> ReadyInputs:
    """Tensors by the names that the model's forward has; labels may be there and are left out."""
    opened, made = open_file(file), model_class(expert)
    main, known = made.main_input_name, list(inspect.signature(made.forward).parameters)[1:]
    for name in opened.tensors:
        if name not in known and name != "labels":
            raise InputError(f"{file}: {made.__name__} takes no input '{name}'; {did_you_mean(name, known)}")
    if main not in opened.tensors:
        raise InputError(f"{file}: holds no '{main}', which {made.__name__} takes; found {', '.join(opened.tensors) or 'none'}")
    generates = expert.config.get("is_encoder_decoder") and "Classification" not in made.__name__
    if generates and "decoder_input_ids" not in opened.tensors:
        raise InputError(f"{file}: holds no 'decoder_input_ids', which {made.__name__} takes besides '{main}'")
    tensors = {name: opened.read_unchanged(name) for name in opened.tensors if name != "labels"}
    rows = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"'{name}' {count}" for name, count in rows.items())
        raise InputError(f"{file}: its tensors must have a row each for the same inputs; rows found: {counts}")
    if rows[main] == 0:
        raise InputError(f"{file}: holds no rows; give at least one")
    _check_kinds(file, tensors, expert)
    width = tensors[main].shape[1] if main == "input_ids" else 0
    return ReadyInputs(tensors, torch.full((rows[main],), width))


def _check_kinds(file: Path, tensors: Mapping[str, Tensor], expert: Checkpoint) -> None:
    for name in ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"):
        tensor = tensors.get(name)
        if tensor is not None and (tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 2):
            raise InputError(f"{file}: '{name}' must be int64 or int32 [row, token], found {tensor.dtype} {list(tensor.shape)}")
    if "attention_mask" in tensors and "input_ids" in tensors and tensors["attention_mask"].shape != tensors["input_ids"].shape:
        shapes = f"{list(tensors['attention_mask'].shape)} and {list(tensors['input_ids'].shape)}"
        raise InputError(f"{file}: 'attention_mask' and 'input_ids' must have one shape, found {shapes}")
    pixels = tensors.get("pixel_values")
    if pixels is None:
        return
    config: Any = model_config(expert)
    config = getattr(config, "vision_config", config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    expected = [channels, size, size] if isinstance(size, int) else [channels, *list(pixels.shape[2:])]
    if pixels.dim() != 4 or list(pixels.shape[1:]) != expected or pixels.dtype != torch.float32:
        shape = ", ".join(map(str, expected))
        raise InputError(f"{file}: 'pixel_values' must be float32 [row, {shape}], found {pixels.dtype} {list(pixels.shape)}")


def _check_vocabulary(file: Path, prepared: Prepared, expert: Checkpoint) -> None:
    config: Any = model_config(expert)
    words = getattr(getattr(config, "text_config", config), "vocab_size", None)
    for indices in torch.split(torch.arange(len(prepared.lengths)), 256):
        ids = prepared.batch(indices).get("input_ids")
        if ids is None or words is None:
            return
        worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        if not 0 <= worst < words:
            raise InputError(
                f"{file}: token {worst} is not in the vocabulary of expert {expert.where}, which has {words}; tokenise the rows "
                "with the expert's own tokenizer"
            )
