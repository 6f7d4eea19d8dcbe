"""LoRA files of kohya's scripts: one weights file without settings, module paths with underscores for dots, an alpha for each.

Diffusers' own files have the same factors under other names; they are refused by name, and so is what resolves to no tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.adapters.translated import Stored, translated
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.formats.registry import WeightsFile, open_file
from acemerge.errors import InputError

_KOHYA = re.compile(r"lora_(te\d?|unet|transformer)_(?P<module>[^.]+)\.(?P<part>.+)")
_OTHERS = (".lora_A.weight", ".lora_B.weight", ".lora.down.weight", ".lora.up.weight", "_lora.down.weight", "_lora.up.weight")
_PEFT_PARTS = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
_SUFFIX = ".safetensors"


def lora_file(path: Path) -> Path | None:
    """The LoRA file without settings that was given, itself or as the one weights file of a folder."""
    files = [path] if path.is_file() else sorted(path.glob(f"*{_SUFFIX}")) if not (path / "config.json").is_file() else []
    if len(files) != 1 or files[0].suffix != _SUFFIX:
        return None
    keys = open_file(files[0]).tensors
    return files[0] if any(_KOHYA.fullmatch(key) or key.endswith(_OTHERS) for key in keys) else None


def read_kohya(file: Path, base: Checkpoint) -> tuple[dict[str, Any], WeightsFile]:
    """Peft's settings and file of the same change."""
    stored = open_file(file)
    modules = _modules(stored, base)
    keys: dict[str, Stored] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, parts in modules.items():
        for part, name in _PEFT_PARTS.items():
            if part not in parts:
                raise InputError(f"{file}: the kohya LoRA of '{module}' has no {part}; the file is not whole, save it again")
            keys[f"{module}.{name}"] = Stored(parts[part])
        ranks[module] = (*stored.tensors[parts["lora_down.weight"]].shape, 0)[0]
        alphas[module] = _alpha(parts["alpha"], stored) if "alpha" in parts else ranks[module]
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    patterns = {"rank_pattern": _unlike(ranks, r), "alpha_pattern": _unlike(alphas, alpha)}
    return {"peft_type": "LORA", "r": r, "lora_alpha": alpha, **patterns}, translated(stored, keys)


def _modules(stored: WeightsFile, base: Checkpoint) -> dict[str, dict[str, str]]:
    """{module of the base: {part: key}}."""
    known: dict[str, list[str]] = {}
    for name, header in base.tensors.items():
        if name.endswith(".weight") and len(header.shape) >= 2:
            module = name.removesuffix(".weight")
            known.setdefault(module.replace(".", "_"), []).append(module)
    modules: dict[str, dict[str, str]] = {}
    for key in stored.tensors:
        match = _KOHYA.fullmatch(key)
        if match is None:
            raise InputError(
                f"{stored.path}: tensor '{key}' is of a diffusers-style LoRA or of one without its adapter_config.json, which "
                "acemerge does not read; save it with peft and give the folder"
            )
        if match["part"] not in (*_PEFT_PARTS, "alpha"):
            raise InputError(f"{stored.path}: tensor '{key}' is of a kohya network other than LoRA; merge it into its base first")
        found = known.get(match["module"], [])
        if len(found) != 1:
            told = "no matrix" if not found else "more than one matrix"
            raise InputError(
                f"{stored.path}: kohya LoRA key '{key}' stands for {told} of base {base.where}; give the base it was trained on, "
                "or merge it into that first"
            )
        parts = modules.setdefault(found[0], {})
        if parts.setdefault(match["part"], key) != key:
            raise InputError(f"{stored.path}: '{parts[match['part']]}' and '{key}' both change '{found[0]}'; split the file")
    return modules


def _alpha(key: str, stored: WeightsFile) -> float:
    if stored.tensors[key].elements != 1:
        raise InputError(f"{stored.path}: '{key}' has shape {list(stored.tensors[key].shape)}, not one number; save it again")
    return float(stored.read(key))


def _unlike(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """The values of modules that are not the usual one, by patterns for their names."""
    return {re.escape(module): value for module, value in values.items() if value != usual}
