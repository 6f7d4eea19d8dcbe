"""The version, where every layer can read it."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """What a result may depend on beside its inputs."""
    return {
        "acemerge": __version__,
        "python": platform.python_version(),
        **{package: _installed(package) for package in ("torch", "safetensors")},
    }


@cache
def _installed(package: str) -> str:
    """Which parses all that the package says of itself: milliseconds."""
    return version(package)
