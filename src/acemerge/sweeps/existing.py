"""Whether a folder already holds the merge that would be written there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.checkpoints.folder import read_json
from acemerge.errors import InputError
from acemerge.output.input_hashes import Hashes
from acemerge.output.writer import MANIFEST
from acemerge.planning.plan import Plan
from acemerge.version import __version__


def holds_merge(folder: Path, plan: Plan, hashes: Hashes) -> bool:
    """By its manifest: this version's, of the same plan and of inputs with the same bytes."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (InputError, OSError):
        return False
    expected: dict[str, Any] = json.loads(json.dumps(plan.to_json()))  # as a file holds it
    tensors = {tensor["name"]: tensor for tensor in expected.pop("tensors")}
    expected |= {"acemerge": __version__, "inputs": {model: dict(files) for model, files in hashes.items()}}
    if any(manifest.get(key) != value for key, value in expected.items()):
        return False
    written = manifest.get("tensors")
    if not isinstance(written, list) or len(written) != len(tensors):
        return False
    return all(isinstance(tensor, dict) and _agrees(tensors.get(tensor.get("name")), tensor) for tensor in written)


def _agrees(planned: Mapping[str, Any] | None, written: Mapping[str, Any]) -> bool:
    """The manifest says of a tensor what the plan does, and then how it came out."""
    return planned is not None and all(written.get(key) == value for key, value in planned.items())
