"""Merges in a child, for tests of what may go wrong around them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from child import CANNOT_MOUNT, Ended, command
from small_models import Models


def merge_command(models: Models, output: Path, *flags: object) -> Callable[[], None]:
    return lambda: command("merge", *models.arguments, "-o", output, "-q", *flags)


def ended_well(ended: Ended) -> tuple[int, str]:
    if ended.code == CANNOT_MOUNT:
        pytest.skip("needs the right to mount")
    assert "Traceback" not in ended.err
    return ended.code, ended.err


def merged_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
