"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from typing import Any


def parse_size(value: Any) -> Any:
    """'5GB', '300MB' or a number of bytes.

    >>> parse_size("1.5GB"), parse_size("200 kb")
    (1500000000, 200000)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError("write a size as 5GB, 300MB or a number of bytes")
    scale = 10 ** (3 * " kmgt".index(match[2].lower() or " "))
    return int(float(match[1]) * scale)


def human_bytes(count: float) -> str:
    """A size for people.

    >>> human_bytes(1500), human_bytes(2.5e9)
    ('1.5 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
