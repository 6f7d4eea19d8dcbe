"""Files beside the weights, copied byte for byte; only a config is edited, where dtype or layers are no longer what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from acemerge.checkpoints.folder import read_json, with_changes

CONFIG = "config.json"


def copy_side_file(path: Path, folder: Path, dtype: str | None, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Copy one file into a folder; `dtype` is what the weights there were converted to, if they were."""
    if path.name == CONFIG and (dtype or changes):
        write_config(with_changes(read_json(path), changes), folder, dtype)
    else:
        shutil.copyfile(path, folder / path.name)


def write_config(config: Mapping[str, Any], folder: Path, dtype: str | None) -> None:
    """Of weights that were converted to this dtype, if to any."""
    stated = {**config, _dtype_key(config): dtype} if dtype else dict(config)
    (folder / CONFIG).write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _dtype_key(config: Mapping[str, Any]) -> str:
    """transformers 5 writes `dtype`, 4 wrote `torch_dtype`."""
    return "dtype" if "dtype" in config else "torch_dtype"
