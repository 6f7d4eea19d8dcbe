"""The sizes of a benchmark's models, from the command line."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Shapes = TypeVar("Shapes", bound="DataclassInstance")


@contextmanager
def asked_for(about: str | None, default: Shapes) -> Iterator[tuple[Shapes, Path]]:
    """The shapes, each field with a flag of its own, and a folder for their models that goes away afterwards."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    arguments = vars(parser.parse_args())
    parent = arguments.pop("folder")
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield type(default)(**arguments), Path(folder)
