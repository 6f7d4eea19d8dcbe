"""Files beside the weights, copied byte for byte; a config is edited only where the weights are no longer what it says."""

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
        write_side_file(CONFIG, with_changes(read_json(path), changes), folder, dtype)
    else:
        shutil.copyfile(path, folder / path.name)


def write_side_file(name: str, content: Mapping[str, Any] | str, folder: Path, dtype: str | None) -> None:
    """The same of one that is no copy: JSON, or text."""
    if isinstance(content, str):
        (folder / name).write_text(content, encoding="utf-8")
        return
    edited = {_dtype_key(content): dtype} if name == CONFIG and dtype else {}
    text = json.dumps({**content, **edited}, indent=2, ensure_ascii=False)
    (folder / name).write_text(text + "\n", encoding="utf-8")


def _dtype_key(config: Mapping[str, Any]) -> str:
    """transformers 5 writes `dtype`, 4 wrote `torch_dtype`."""
    return "dtype" if "dtype" in config else "torch_dtype"
