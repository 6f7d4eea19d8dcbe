"""Files that appear whole: written beside their place and moved there in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """A path to write to, which takes the file's name when all is written. A reader sees the old file or the new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        yield staged
        staged.replace(file)
    finally:
        staged.unlink(missing_ok=True)
