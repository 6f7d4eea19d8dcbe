"""Where what can be made or fetched again is kept: measurements on data, the bench's packages, experts and scores."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

CACHE_VARIABLE = "ACEMERGE_CACHE"


def cache_folder() -> Path:
    """ACEMERGE_CACHE, or the place that the system has for caches: ~/.cache/acemerge on Linux."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else user_cache_path("acemerge")
