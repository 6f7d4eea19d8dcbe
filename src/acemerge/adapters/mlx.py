"""Adapters of mlx-lm: W' = W + scale (lora_a lora_b)^T, with lora_a of in x r and lora_b of r x out, both peft's transposed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.adapters.settings import CONFIG
from acemerge.adapters.translated import Stored, translated
from acemerge.checkpoints.families import matches
from acemerge.checkpoints.formats.registry import WeightsFile, open_file
from acemerge.checkpoints.tied import INPUT_EMBEDDINGS
from acemerge.checkpoints.untrusted import check_inside, shortened
from acemerge.errors import InputError

WEIGHTS = "adapters.safetensors"
_FUSE = "Merge it into its base with mlx_lm.fuse --dequantize, and give that folder"
_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_PEFT_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_PEFT_EMBEDDING_PARTS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}


def is_mlx(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json is of mlx-lm: peft's always says its type."""
    return "peft_type" not in settings and ("fine_tune_type" in settings or "lora_parameters" in settings)


def read_mlx(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], WeightsFile]:
    """Peft's settings and file of the same change."""
    kind = settings.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        what = shortened(repr(kind))
        raise InputError(f"{path / CONFIG}: an mlx-lm adapter with fine_tune_type {what}; acemerge reads lora and dora. {_FUSE}")
    rank, scale = _rank_and_scale(settings, path / CONFIG)
    file = path / WEIGHTS
    if not file.is_file():
        raise InputError(f"{path}: has {CONFIG} of mlx-lm, but no {WEIGHTS}; download the weights too, or rename the checkpoint")
    check_inside(path, (path / CONFIG, file))
    stored = open_file(file)
    keys = dict(_translation(key, stored) for key in stored.tensors)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "use_dora": kind == "dora"}, translated(stored, keys)


def _rank_and_scale(settings: Mapping[str, Any], config: Path) -> tuple[int, float]:
    given = settings.get("lora_parameters")
    if not isinstance(given, dict):
        raise InputError(f"{config}: an mlx-lm adapter without lora_parameters; write its rank and scale there")
    rank, scale, alpha = (given.get(name) for name in ("rank", "scale", "alpha"))
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"{config}: the rank in lora_parameters is {shortened(repr(rank))}, not a positive whole number; set it")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise InputError(f"{config}: the scale in lora_parameters is {shortened(repr(scale))}, not a number; set it")
    # Early versions, which wrote lora_layers, multiplied by alpha / rank as well; later ones wrote an alpha that they ignored.
    if "lora_layers" in settings and alpha not in (None, rank):
        raise InputError(
            f"{config}: both scale={scale} and alpha={shortened(repr(alpha))}, which versions of mlx-lm with lora_layers "
            "took differently; set scale to the whole factor and remove alpha"
        )
    return rank, scale


def _translation(key: str, stored: WeightsFile) -> tuple[str, Stored]:
    """Peft's name of a tensor, and where it is."""
    match = _PART.fullmatch(key)
    shape = stored.tensors[key].shape
    if match is None:
        raise InputError(f"{stored.path}: tensor '{key}' is no lora_a, lora_b or m of an mlx-lm adapter. {_FUSE}")
    part = match["part"]
    if part != "m" and len(shape) == 3:
        told = f"tensor '{key}' {list(shape)} changes the stacked experts of a mixture, which is not supported"
        raise InputError(f"{stored.path}: {told}. {_FUSE}")
    if len(shape) != (1 if part == "m" else 2):
        raise InputError(f"{stored.path}: tensor '{key}' has shape {list(shape)}, which is no {part}; save the adapter again")
    parts = _PEFT_EMBEDDING_PARTS if matches(f"{match['module']}.weight", INPUT_EMBEDDINGS) else _PEFT_PARTS
    if part not in parts:  # mlx rescales the rows of a table, peft its columns
        raise InputError(f"{stored.path}: tensor '{key}' is of DoRA on an embedding, which is not supported. {_FUSE}")
    return f"{match['module']}.{parts[part]}", Stored(key, transposed=part != "m")
