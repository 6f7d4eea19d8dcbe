"""Tiny models to merge."""

from pathlib import Path

import pytest

from small_models import Models, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)
