"""Registries that fill themselves: a file put in a package, or an entry point of another one, is all it takes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from types import ModuleType


def modules_of(package: str) -> list[ModuleType]:
    """Every file of a package, imported."""
    folder = importlib.import_module(package).__path__
    return [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder)]


def has_module(package: str, name: str) -> bool:
    """Whether a package has a file of that name."""
    return name.isidentifier() and importlib.util.find_spec(f"{package}.{name}") is not None


def register_all(package: str, entry_points: str) -> None:
    """Import every file of a package and load every entry point of a group: importing is what registers."""
    modules_of(package)
    for entry in importlib.metadata.entry_points(group=entry_points):
        entry.load()
