"""Models to merge: tiny ones of a test's own, and real ones that are only read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import model_zoo as zoo
import small_models


@pytest.fixture
def models(tmp_path: Path) -> small_models.Models:
    return small_models.write_models(tmp_path)


@pytest.fixture(scope="session")
def plain(models_of: Callable[..., zoo.Models]) -> zoo.Models:
    return models_of(zoo.unknown)


@pytest.fixture(scope="session")
def llama(models_of: Callable[..., zoo.Models]) -> zoo.Models:
    return models_of(zoo.llama, tied=False)
