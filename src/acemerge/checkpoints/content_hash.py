"""Hashes of files and of tensors' values, each with the name of its algorithm: `blake3:` or `sha256:` and 64 digits.

BLAKE3 is what is computed: as strong as SHA-256, and four times as fast on a processor that has instructions for SHA-256, more on
others. Files of the hub's cache are named by their SHA-256, which costs nothing to tell.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import AfterValidator

Algorithm = Literal["blake3", "sha256"]


def _checked(told: str) -> str:
    if not re.fullmatch("(blake3|sha256):[0-9a-f]{64}", told):
        raise ValueError(f"{reprlib.repr(told)} is no hash; write blake3: or sha256: and its 64 hexadecimal digits")
    return told


ContentHash = Annotated[str, AfterValidator(_checked)]

_READ_AT_ONCE = 2**23  # after each of these the thread must wait for Python's lock

_DIGEST: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}


class RunningHash:
    """BLAKE3 of what is given piece by piece."""

    def __init__(self, content: bytes | memoryview[int] = b"") -> None:
        self._digest = blake3(content)

    def update(self, more: bytes | memoryview[int]) -> None:
        """What comes next."""
        self._digest.update(more)

    def told(self) -> str:
        """Of everything so far."""
        return f"blake3:{self._digest.hexdigest()}"


def file_hash(path: Path, algorithm: Algorithm = "blake3", stopped: Callable[[], bool] = lambda: False) -> str:
    """Of a file's content; given up as soon as it is stopped."""
    digest, memory = _DIGEST[algorithm](), memoryview(bytearray(min(_READ_AT_ONCE, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            if stopped():
                raise CancelledError
            digest.update(memory[:count])
    return f"{algorithm}:{digest.hexdigest()}"


def algorithm_of(content_hash: str) -> Algorithm:
    """By which a hash was computed."""
    return "sha256" if content_hash.startswith("sha256:") else "blake3"


def has_hash(path: Path, expected: str) -> bool:
    """Whether a file's content has this hash, of whichever algorithm."""
    return file_hash(path, algorithm_of(expected)) == expected


def name_in_hub_cache(path: Path) -> str | None:
    """The hash by which the hub's cache names a file; none for other files."""
    real = path.resolve()
    return f"sha256:{real.name}" if len(real.name) == 64 and real.parent.name == "blobs" else None


def named_sha256(path: Path) -> str:
    """The bare SHA-256 of a published file, as its publisher tells it."""
    return (name_in_hub_cache(path) or file_hash(path, "sha256")).removeprefix("sha256:")
