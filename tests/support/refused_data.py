"""Merges that are refused because of their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import acemerge
from acemerge.errors import AcemergeError
from model_zoo import Models, quiet_transformers


def refusal(models: Models, tmp_path: Path, method: str = "regmean", **settings: Any) -> str:
    """The one message with which a merge ends that leaves nothing behind."""
    with pytest.raises(AcemergeError) as caught, quiet_transformers():
        acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method=method, **settings)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists(), "nothing was measured"
    return str(caught.value)
