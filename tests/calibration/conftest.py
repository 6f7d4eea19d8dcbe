"""What is measured is kept in a cache; each test has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import model_zoo
from data_merges import FAMILIES, ModelsAndRows
from data_statistics import write_rows
from model_zoo import Models, copy_models, quiet_transformers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


@pytest.fixture
def models(models_of: Callable[..., Models], tmp_path: Path) -> Models:
    return copy_models(models_of(model_zoo.bert), tmp_path / "models")


@pytest.fixture
def models_and_rows(models_of: Callable[..., Models], tmp_path: Path) -> ModelsAndRows:
    """A family's models and rows for them, which a test may change."""

    def get(family: str, **settings: Any) -> tuple[Models, Path]:
        models = copy_models(models_of(FAMILIES[family]), tmp_path / "models")
        return models, write_rows(tmp_path / "rows", models.experts, pixels=family == "vit", **settings)

    return get
