"""Whether a folder already holds the merge that would be written there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.errors import InputError
from acemerge.output.input_hashes import Hashes
from acemerge.output.manifest import read_merge
from acemerge.planning.plan import Plan
from acemerge.version import __version__


def holds_merge(folder: Path, plan: Plan, hashes: Hashes) -> bool:
    """By its manifest: this version's, of the same plan and of inputs with the same bytes."""
    try:
        manifest = read_merge(folder).to_json()
    except InputError:
        return False
    expected: dict[str, Any] = json.loads(json.dumps(plan.to_json()))  # as a file holds it
    tensors = {tensor["name"]: tensor for tensor in expected.pop("tensors")}
    expected |= {"acemerge": __version__, "inputs": {model: dict(files) for model, files in hashes.items()}}
    written = manifest["tensors"]
    return (
        _agrees(expected, manifest)
        and len(written) == len(tensors)
        and all(_agrees(tensors.get(tensor["name"]), tensor) for tensor in written)
    )


def _agrees(planned: Mapping[str, Any] | None, written: Mapping[str, Any]) -> bool:
    """The manifest says what the plan does, and then how it came out."""
    return planned is not None and all(written.get(key) == value for key, value in planned.items())
