"""Files beside the weights, copied byte for byte; only a config's dtype is edited, and only when --dtype changed the weights'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.checkpoints.folder import read_json


def copy_side_file(path: Path, folder: Path, dtype: str | None) -> None:
    """Copy one file into a folder; `dtype` is what the weights there were converted to, if they were."""
    if path.name == "config.json" and dtype:
        config = read_json(path)
        config[_dtype_key(config)] = dtype
        (folder / path.name).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(path, folder / path.name)


def _dtype_key(config: Mapping[str, Any]) -> str:
    """transformers 5 writes `dtype`, 4 wrote `torch_dtype`."""
    return "dtype" if "dtype" in config else "torch_dtype"
