"""A folder's config.json as transformers understands it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from acemerge.errors import InputError, first_line


def transformers_config(folder: Path, whose: str) -> Any:
    """Read from this machine, running no code of the folder's."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what its hundreds of classes raise at a value that they do not expect
        raise InputError(f"{whose}: transformers does not understand its config.json ({first_line(error)})") from None
